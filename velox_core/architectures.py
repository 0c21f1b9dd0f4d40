"""What is special about single architectures of mlx-lm, by the name of their model file."""

#: Caches that are bounded by the model itself: they stay as they are.
BOUNDED = ("RotatingKVCache", "ArraysCache", "ChunkedKVCache")

#: Models that keep the plain caches of a layer in a CacheList and use each by itself.
SPLITTABLE = ("baichuan_m1", "falcon_h1", "longcat_flash", "longcat_flash_ngram")

#: Models that would go wrong, without a word, on rows with gaps between them.
REFUSED = {
    "afm7": "its reuse layers take the number of rows for the position",
    "deepseek_v32": "its indexer picks rows by their place in the cache",
    "glm_moe_dsa": "its indexer picks rows by their place in the cache",
    "minimax_m3_vl": "its indexer picks rows by their place in the cache",
    "phi3small": "its block-sparse layers mask rows by their place in the cache",
}

#: Models that attend with other keys than they store, under a mask of their own making: multi-head
#: latent attention.
LATENT = (
    "bailing_hybrid",
    "bailing_moe_v3",
    "deepseek_v3",
    "glm4_moe_lite",
    "kimi_k25",
    "kimi_k3",
    "kimi_linear",
    "kimi_vl",
    "longcat_flash",
    "longcat_flash_ngram",
    "mistral4",
)

#: Models whose layers attend to other layers' rows, with queries that nobody would renumber.
SHARED = ("gemma4", "gemma4_text", "iquestloopcoder")

#: Models that use the first layer's mask where it can't be replaced by a layer's own.
ONE_MASK = (*LATENT, *SHARED)

#: Models whose blocks can't evict token by token.
WHOLE_BLOCKS = {
    "gemma2": "it writes its attention out",
    "gemma3n": "its last layers attend to the rows of earlier ones",
    "gemma4": "its last layers attend to the rows of earlier ones",
    "gemma4_text": "its last layers attend to the rows of earlier ones",
    "iquestloopcoder": "its second loop attends to the rows of the first",
    "plamo2": "it writes its attention out",
}
