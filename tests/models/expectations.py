"""What is special about single models, each with its reason.

A model that is not named here is captured as one graph.
"""

from __future__ import annotations

LAYER_DROP = "layer drop compares a random tensor with a number in an `if`"
LOCK = "weight normalisation enters a lock"

# Where the library's own Python keeps Dynamo from capturing one graph; the parts still go through the backend.
GRAPH_BREAKS: dict[tuple[str, str], str] = {
    ("bart", "training"): LAYER_DROP,
    ("whisper", "training"): LAYER_DROP,
    ("wav2vec2", "inference"): LOCK,
    ("wav2vec2", "training"): LOCK,
}

# Floating inputs whose gradient the model does not give.
NO_INPUT_GRADIENT: dict[str, str] = {
    "wav2vec2": "it sets `requires_grad` on a view of its input, which must thus be a leaf"
}

# Where eager in float64 is another function, so that results are compared with eager's.
NO_REFERENCE: dict[tuple[str, str], str] = {
    ("swin", "training"): "drop path draws in the dtype of the model, and other numbers in float64",
    ("dinov2", "training"): "drop path draws in the dtype of the model, and other numbers in float64",
}

# Trained for one step only.
ONE_STEP: dict[str, str] = {
    "mobilenet_v2": "52 bounded activations: a step moves some value past a bound in one run and not in the other"
}

# Where rounding decides on which side of its bound an activation lies, a gradient of the last layers comes or goes as a
# whole, and with it that share of every gradient before it. Outputs hardly notice.
FLIPS: dict[str, tuple[float, str]] = {
    "mobilenet_v2": (
        1e-2,
        "bounded activations: with AVX-512 the gradients of eager itself are 6e-6 from float64 as they are, and 2e-3 "
        "channels last",
    )
}
