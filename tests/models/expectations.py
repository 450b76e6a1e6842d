"""What is special about single models, each with its reason.

A model that is not named here is captured as one graph and gives eager's bits.
"""

from __future__ import annotations

LAYER_DROP = "layer drop compares a random tensor with a number in an `if`"
LOCK = "weight normalisation enters a lock"
BROKEN_SUM = "a graph break splits a sum of gradients, which autograd then adds in another order"
MASKED_KEYS = (
    "while compiling, the library passes a mask and repeated keys where eager passes `is_causal` and grouped keys"
)
SCAN = "while compiling, the library replaces the loop over time by an associative scan"
IN_PLACE = "gates computed in place on strided views become contiguous, and the vector loop ends elsewhere"

# Where the library's own Python keeps Dynamo from capturing one graph; the parts still go through the backend.
GRAPH_BREAKS: dict[tuple[str, str], str] = {
    ("bart", "training"): LAYER_DROP,
    ("whisper", "training"): LAYER_DROP,
    ("wav2vec2", "inference"): LOCK,
    ("wav2vec2", "training"): LOCK,
    ("mixtral", "training"): "the backward of the grouped product reads the group sizes on the host",
}

# Where the captured program is not, rounding for rounding, what eager runs. Judged by distance from float64.
ROUNDING: dict[tuple[str, str], str] = {
    ("llama", "training"): MASKED_KEYS,
    ("qwen2", "training"): MASKED_KEYS,
    ("mixtral", "training"): MASKED_KEYS,
    ("bart", "training"): BROKEN_SUM,
    ("whisper", "training"): BROKEN_SUM,
    ("wav2vec2", "training"): BROKEN_SUM,
    ("mamba", "inference"): SCAN,
    ("mamba", "training"): SCAN,
    ("gru", "inference"): IN_PLACE,
    ("gru", "training"): IN_PLACE,
}

# Floating inputs whose gradient the model does not give.
NO_INPUT_GRADIENT: dict[str, str] = {
    "wav2vec2": "it sets `requires_grad` on a view of its input, which must thus be a leaf"
}

# Where the random stream ends elsewhere than in eager; the test fails when it no longer does.
DEAD_DRAWS: dict[tuple[str, str], str] = {
    ("wav2vec2", "inference"): "AOTAutograd removes a draw that nobody reads, here the one for layer drop"
}
