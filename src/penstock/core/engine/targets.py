"""What may be loaded at run time: what the configuration names, and the files of the model store. Nothing else."""

from __future__ import annotations

import os

from penstock.config.schema import Config, ModelConfig
from penstock.errors import BadRequest, Forbidden
from penstock.plugins import is_whole_file


class AllowedTargets:
    """The targets that the management listener may load. Symbolic links are resolved before anything is compared."""

    def __init__(self, config: Config) -> None:
        self._known = [(model.name or section, model) for section, model in config.models.items()]
        self._store = None if config.server.model_store is None else os.path.realpath(config.server.model_store)

    def resolve(self, target: str, model: str, version: str) -> tuple[str, ModelConfig | None]:
        """(the target to load, the section that names it, None for a file of the store). Raises Forbidden, BadRequest.

        Of several sections with the target that of the very version counts, else one of the model, else the first. A
        relative path starts at the folder of the configured file, or at the store. The messages name no path of this
        machine.
        """
        where, colon, attribute = target.rpartition(":")
        named = bool(colon and where and attribute) or is_whole_file(target)
        if not named or not target.isprintable():
            raise BadRequest("target: expected for instance app.py:Model, model.onnx or pipeline.toml")
        if "://" in target:
            raise Forbidden("target: models are not loaded from URLs; put the file into server.model_store")
        known = [(name, section) for name, section in self._known if _names(section.target, target)]
        if known:
            _, section = max(known, key=lambda k: (k[0] == model) + (k[0] == model and k[1].version == version))
            return section.target, section
        if self._store is not None and (is_whole_file(target) or _is_file(where)):
            whole = is_whole_file(target)
            file = os.path.realpath(os.path.join(self._store, target if whole else where))
            if file.startswith(self._store + os.sep):
                if not (is_whole_file(file) if whole else file.endswith(".py")) or not os.path.isfile(file):
                    raise BadRequest("target: the model store has no such file")
                if whole:
                    return file, None
                if not attribute.isidentifier():  # "model.py:os.system" is not what the owner of the file offers
                    raise BadRequest(
                        "target: expected the name of a function, class or object of the file, without dots"
                    )
                return f"{file}:{attribute}", None
        raise Forbidden(
            "target: it is neither one that the server's configuration names nor a file in server.model_store"
        )


def _is_file(where: str) -> bool:
    return where.endswith(".py") or "/" in where


def _names(known: str, target: str) -> bool:
    if is_whole_file(known):
        return is_whole_file(target) and _same_file(known, target)
    known_where, _, known_attribute = known.rpartition(":")
    where, _, attribute = target.rpartition(":")
    return target == known or (attribute == known_attribute and _same(known_where, where))


def _same(known: str, where: str) -> bool:
    return _is_file(known) and _is_file(where) and _same_file(known, where)


def _same_file(known: str, where: str) -> bool:
    known = os.path.expanduser(known)
    return os.path.realpath(os.path.join(os.path.dirname(known), where)) == os.path.realpath(known)
