"""A captioner of video frames: `penstock serve app.py`; `--model Salesforce/blip2-opt-2.7b` serves the real one."""

from pathlib import Path

import penstock
from penstock.bulk.captioner.model import TransformersCaptioner


@penstock.model
class Captioner(TransformersCaptioner):
    default_model = str(Path(__file__).with_name("captioner"))
