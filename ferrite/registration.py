"""Registers the backend with Dynamo when it is imported; the entry point `torch_dynamo_backends` leads here.

PyTorch's look-up of a backend takes no lock. Each of several threads whose first `torch.compile` comes at the same time
loads the entry point and registers what it finds, and a second registration under one name is an error. The body of a
module, however, runs once, however many threads import it at the same time. So the body registers the backend, and the
entry point names None: `register_backend(None)` registers nothing, and the look-up then finds what is there.
"""

from __future__ import annotations

from torch._dynamo.backends import registry

from ferrite.backend import chosen_options, compile

NOTHING_MORE = None

chosen_options(None, None)  # an environment that means nothing is an error of the first `torch.compile`

if "ferrite" not in registry._COMPILER_FNS:  # a program may have registered the function itself
    registry.register_backend(compile, name="ferrite")
