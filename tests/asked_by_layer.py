"""What velox asks in each layer and at each step anew, to be compared with."""

from collections.abc import Iterator

from velox_core import hookimpl


class Counts:
    """An observer, who wants to see each call: it counts how often rows are scored."""

    times = 0

    @hookimpl(wrapper=True)
    def score(self) -> Iterator[None]:
        self.times += 1
        return (yield)
