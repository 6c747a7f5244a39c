"""TPE: Optuna's sampler says which settings come next, from how the ones before did."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

from penstock.errors import ConfigError, install_hint
from penstock.perf.tune.field import Field
from penstock.perf.tune.space import Settings, settings

_MOST: Final = 40  # settings that it may ask for
_SHARE: Final = 0.4  # of all


def check() -> None:
    """Raises ConfigError if it cannot be used."""
    _optuna()


def tpe(field: Field) -> None:
    """Each setting that is asked for challenges the best one; what it is known to sustain is what it is worth."""
    optuna = _optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=field.rng.randrange(2**31), n_startup_trials=6, multivariate=False)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    worth: dict[Settings, float] = {}
    most = min(_MOST, max(8, round(_SHARE * len(field.space))))
    for _ in range(3 * most):  # it may ask for the same again
        asked = study.ask()
        found = _settings(field, asked)
        if found not in worth:
            field.challenge(found)
            worth[found] = field.trial(found).estimate
        study.tell(asked, worth[found])
        if len(worth) >= most:
            return


def _settings(field: Field, asked: Any) -> Settings:
    """Of knobs with numbers the place in their order is asked for, which is what neighbours share."""
    found = {}
    for knob in field.space.knobs:
        if knob.ordered:
            values = sorted(knob.values)
            found[knob.name] = values[asked.suggest_int(knob.name, 0, len(values) - 1)]
        else:
            found[knob.name] = knob.values[asked.suggest_categorical(knob.name, list(range(len(knob.values))))]
    return settings(found)


def _optuna() -> ModuleType:
    try:
        import optuna
    except ImportError:
        raise ConfigError(f"--search tpe needs Optuna: {install_hint('tune')}") from None
    return optuna
