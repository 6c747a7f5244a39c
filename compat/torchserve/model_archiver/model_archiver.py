"""Writes archives from Python."""

from model_archiver.model_archiver_config import ModelArchiverConfig
from model_archiver.model_packaging import generate_model_archive


class ModelArchiver:
    @staticmethod
    def generate_model_archive(config: ModelArchiverConfig) -> None:
        """Writes the archive that `config` describes. Raises ModelArchiverError."""
        generate_model_archive(config)
