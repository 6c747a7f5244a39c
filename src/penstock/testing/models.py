"""check_model: the contract of models, for a function, or a class or instance with `predict`, or `admit` and `step`."""

from collections.abc import Callable, Sequence
from typing import Any

from penstock.config.schema import BatchingConfig
from penstock.core.worker.loop import BatchRunner
from penstock.core.worker.python_model import PythonModel
from penstock.types import BatchPart, Item


def check_model(
    target: Any,
    items: Sequence[Any],
    *,
    same: Callable[[Any, Any], bool] = lambda a, b: bool(a == b),
    device: str = "cpu",
) -> None:
    """Loads the model, runs the items alone and in batches, and unloads it. Raises AssertionError.

    The result of an item must not depend on the other items of its batch; `same` compares two results. Streams are
    compared part by part.
    """
    assert items, "check_model needs at least one item"
    model = PythonModel(target)
    model.load(device)
    batching = BatchingConfig(retry_split=False)
    model.begin_loop(batching)
    runner = BatchRunner(model, model.metadata("checked", "1"), batching)
    try:
        alone = [_answers(runner, [item])[0] for item in items]
        for batch in (list(range(len(items))), list(reversed(range(len(items)))), [0, *range(len(items))]):
            together = _answers(runner, [items[i] for i in batch])
            for i, answer in zip(batch, together, strict=True):
                fits = len(answer) == len(alone[i]) and all(map(same, answer, alone[i]))
                assert fits, f"item {i} alone gave {alone[i]!r}, in a batch of {len(batch)} {answer!r}"
    finally:
        runner.close()


def _answers(runner: BatchRunner, items: Sequence[Any]) -> list[list[Any]]:
    """The parts of the result of each item."""
    parts: list[BatchPart] = []
    runner.run(1, runner.decode([Item(item) for item in items]), parts.append)
    assert [part.final for part in parts] == [False] * (len(parts) - 1) + [True]
    answers: list[list[Any]] = [[] for _ in items]
    for part in parts:
        for answer, result in zip(answers, part.results, strict=True):
            if result is not None:
                assert result.error is None, f"{result.error}\n{result.error.detail}"
                answer.append(result.body)
    return answers
