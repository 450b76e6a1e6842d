"""How a failed compile shows through Dynamo."""

from __future__ import annotations

import inspect

from torch._dynamo.exc import BackendCompilerFailed, ShortenTraceback


class FerriteError(BackendCompilerFailed):
    """A compile failed. Names the stage, keeps the exception, shows as one readable error through Dynamo."""

    def __init__(self, where: str, inner: Exception) -> None:
        self.backend_name = "ferrite"
        self.inner_exception = inner
        message = f"Ferrite failed in {where}:\n{type(inner).__name__}: {inner}"
        # The frame that raises: Dynamo cuts the traceback there, and must find it in it.
        frame = inspect.currentframe()
        ShortenTraceback.__init__(self, message, first_useful_frame=frame.f_back if frame else None)
