"""The names of torch-model-archiver 0.12.0, implemented by Penstock."""

from model_archiver.model_archiver import ModelArchiver
from model_archiver.model_archiver_config import ModelArchiverConfig

__all__ = ["ModelArchiver", "ModelArchiverConfig"]
__version__ = "0.12.0"
