"""Measuring what a policy costs: perplexity, recall of a pass key, and the like.

One file a kind of measurement, each with a function that measures, and ``table`` and ``plot``,
which show what was measured. ``velox eval`` and ``velox bench`` run them, ``velox report`` makes a
page of them.
"""
