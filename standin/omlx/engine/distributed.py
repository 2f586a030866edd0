"""The error of a cluster that cannot serve; there are no clusters here."""


class DistributedInferenceError(RuntimeError):
    """Mapped to 503."""
