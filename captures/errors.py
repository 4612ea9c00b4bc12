"""The errors that a user can cause and can cure.

LayerBisectError
├── CaptureError
├── RecordError
├── WorkerError
├── TrainerError
├── TokenMismatchError
└── ModelDirectoryError

Each message is one sentence that holds the received value and says what to do. The command line
prints it and exits with code 2.
"""


class LayerBisectError(ValueError):
    """Input that cannot be judged; the base of every error meant for users."""


class CaptureError(LayerBisectError):
    """A capture on disk that is missing, broken, empty, or of the wrong kind."""


class RecordError(LayerBisectError):
    """A record of scores that is missing, damaged, or says what cannot be."""


class WorkerError(LayerBisectError):
    """A rollout worker that is down, slow, answers an error, or answers for something else."""


class TrainerError(LayerBisectError):
    """A trainer's forward that answers for something else, or with what is no score."""


class TokenMismatchError(LayerBisectError):
    """Two captures of different tokens, which no number may compare."""


class ModelDirectoryError(LayerBisectError):
    """A model directory that is missing, unsupported, or does not fit the capture."""
