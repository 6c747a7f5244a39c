"""`penstock serve examples/digits/app.py:Digits` serves this model.

A model is a class with

- `load(device)`        once in each worker, before the first batch;
- `predict(items)`      a list of items in, a list of as many results out; an exception in a result's place fails
                        only its own item;

and, when it likes, `preprocess(item)` and `postprocess(result)` for one item each, `warmup()` with sample items for the
first runs, `unload()`, and `inputs` and `outputs` for Open Inference clients. `@penstock.model(...)` sets defaults for
its batching. The class itself is in `src/penstock/cli/demo/digits.py`, because `penstock demo` serves it too.
"""

from __future__ import annotations

from penstock.cli.demo.digits import Digits

__all__ = ["Digits"]
