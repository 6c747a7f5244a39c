"""The verdict: one line that says whether the server is well, and if not, which model is not and why."""

# Questions are asked in the order of an operator at night: does something not answer, does it answer with errors, does
# it refuse, is it late, and only then why. The first answer that is yes is the verdict; the most affected model is
# named. A condition must hold for most of the last seconds, so that a single late request is no alarm. If all is well
# so far, the first cause of `causes.py` is the verdict: the server answers in time, and could answer more.

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

from penstock.core.contracts import ModelSnapshot
from penstock.serving.observe.causes import Finding
from penstock.serving.observe.history import Key, Second, merged

LOOKED_S: Final = 10  # seconds that a verdict looks back
SHARE: Final = 0.01  # errors and refusals below this share of the requests are no verdict
LATE_WITHOUT_SLO_S: Final = 1.0  # oldest request in the queue of a model without `slo_s`
BUSY: Final = 0.9  # share of the time in which all instances ran batches


class Verdict(Struct, frozen=True):
    """`level` is "ok", "warning" or "error", `word` what is wrong in one or two words, `text` says it to people.
    `causes` are the findings about this model first, and then about others."""

    level: str
    word: str
    text: str
    model: str = ""
    version: str = ""
    causes: Sequence[Finding] = ()


def verdict(
    models: Sequence[ModelSnapshot], last: Mapping[Key, Sequence[Second]], causes: Sequence[Finding] = ()
) -> Verdict:
    """The verdict on these models and their last seconds, the newest last, with the causes that were found."""
    if not models:
        return Verdict("warning", "empty", "No model is loaded.")
    for judge in (_state, _failing, _refusing, _late):
        found = [(seriousness, m, text) for m in models for seriousness, text in judge(m, _looked(m, last))]
        if found:
            _, model, (level, word, text) = max(found, key=lambda each: each[0])
            status = model.status
            about = sorted(causes, key=lambda c: (c.model, c.version) != model.key)
            because = f" {_told(about[0])}" if about and (about[0].model, about[0].version) == model.key else ""
            return Verdict(level, word, text + because, status.name, status.version, about)
    if causes:
        first = causes[0]
        return Verdict("warning", first.cause, _told(first), first.model, first.version, causes)
    busy = sum(any(second.requests for second in last.get(m.key, ())) for m in models)
    doing = "no requests" if not busy else f"requests for {busy}" if busy < len(models) else "requests"
    text = f"All {len(models)} models answer within their limits; {doing} in the last seconds."
    return Verdict("ok", "healthy", text)


def _told(found: Finding) -> str:
    gain = "" if found.gain is None else f", for about {found.gain:.1f} times the requests"
    return f"Model '{found.model}': {found.evidence}; {found.change}{gain}."


_Judged = list[tuple[float, tuple[str, str, str]]]  # (seriousness, (level, word, text)), or nothing


def _looked(model: ModelSnapshot, last: Mapping[Key, Sequence[Second]]) -> Second:
    seconds = last.get(model.key, ())[-LOOKED_S:]
    return merged(seconds) if seconds else Second()


def _state(model: ModelSnapshot, now: Second) -> _Judged:
    status = model.status
    name = f"'{status.name}'"
    if status.state == "FAILED":
        return [(3.0, ("error", "failed", f"Model {name} has failed to load: the log says why."))]
    if status.state == "LOADING":
        return [(1.0, ("warning", "loading", f"Model {name} is loading."))]
    if status.state == "READY" and status.ready_instances < status.instances:
        found = f"{status.ready_instances} of {status.instances} instances of model {name} are up"
        return [(2.0, ("error" if not status.ready_instances else "warning", "restarting", f"Only {found}."))]
    return []


def _failing(model: ModelSnapshot, now: Second) -> _Judged:
    share = now.failed / now.answers if now.answers else 0.0
    if share < SHARE:
        return []
    text = f"Model '{model.status.name}' answers {share:.0%} of its requests with errors: the log says why."
    return [(share, ("error", "errors", text))]


def _refusing(model: ModelSnapshot, now: Second) -> _Judged:
    share = now.rejected / now.requests if now.requests else 0.0
    if share < SHARE:
        return []
    text = f"Model '{model.status.name}' refuses {share:.0%} of {now.requests:.0f} requests a second{_why(model, now)}."
    return [(share, ("error", "refusing", text))]


def _late(model: ModelSnapshot, now: Second) -> _Judged:
    limit_s = model.slo_s or LATE_WITHOUT_SLO_S
    late_s = max(now.oldest_s, now.p99_s if model.slo_s else 0.0)
    if late_s <= limit_s:
        return []
    promised = f", its target is {_seconds(limit_s)}" if model.slo_s else ""
    text = f"Requests to model '{model.status.name}' take up to {_seconds(late_s)}{promised}{_why(model, now)}."
    return [(late_s / limit_s, ("warning", _word(model, now), text))]


def _word(model: ModelSnapshot, now: Second) -> str:
    return "computing" if now.busy >= BUSY * max(1, model.status.ready_instances) else "waiting"


def _why(model: ModelSnapshot, now: Second) -> str:
    status = model.status
    if _word(model, now) == "waiting":
        return ""
    instances = "its instance is" if status.ready_instances == 1 else f"its {status.ready_instances} instances are"
    return f": {instances} busy all the time, with {now.rows:.0f} of at most {status.max_batch_size} rows a batch"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
