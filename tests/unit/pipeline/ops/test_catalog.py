from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.errors import ConfigError
from penstock.pipeline.notation import dialect
from penstock.pipeline.ops import catalog
from penstock.pipeline.ops.base import ItemOp


class Mine(ItemOp):
    """It is mine."""


@pytest.fixture
def registered():
    catalog.register("Mine", Mine)
    yield
    catalog.unregister("Mine")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("DecodeMat", "DecodeMat"),
        ("cvtColorMat", "CvtColorMat"),
        ("RESIZEMAT", "ResizeMat"),
    ],
)
def test_a_name_is_found_in_any_case(name, found):
    assert catalog.find(name).__name__ == found


def test_an_unknown_name_is_reported_with_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown op 'ResizMat'; did you mean 'ResizeMat'\?"):
        catalog.find("ResizMat")
    with pytest.raises(ConfigError, match="unknown op 'qqqqqq'; there are"):
        catalog.find("qqqqqq")


def test_no_two_names_differ_in_case_only():
    lower = [n.lower() for n in (*catalog.BUILTIN, *dialect().ops, *dialect().absent_ops)]
    assert len(lower) == len(set(lower))


def test_a_registered_op_is_found_and_may_replace_another(registered):
    assert catalog.find("mine") is Mine
    assert "Mine" in catalog.names()

    class Other(ItemOp):
        """Another."""

    catalog.register("mINE", Other)
    assert catalog.find("Mine") is Other
    catalog.register("Mine", Mine)
    assert catalog.find("mINE") is Mine
    catalog.unregister("mine")
    with pytest.raises(ConfigError, match="unknown op 'Mine'"):
        catalog.find("Mine")


def test_registered_ops_override_built_in_ones():
    catalog.register("identity", Mine)
    try:
        assert catalog.find("Identity") is Mine
    finally:
        catalog.unregister("Identity")
    assert catalog.find("Identity").__name__ == "Identity"


@pytest.mark.parametrize("cls", [Mine(), int, lambda data: data])
def test_only_classes_of_ops_are_registered(cls):
    with pytest.raises(ConfigError, match=r"op 'x' is .*, expected a subclass of"):
        catalog.register("x", cls)


def test_an_op_with_a_missing_library_names_the_package_to_install(monkeypatch):
    for module in [m for m in sys.modules if m.startswith("penstock.pipeline.ops.") or m == "cv2"]:
        if module not in ("penstock.pipeline.ops.base", "penstock.pipeline.ops.catalog", "penstock.pipeline.ops.base"):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(ConfigError, match=r"ResizeMat needs cv2, which is not installed: pip install 'opencv"):
        catalog.find("ResizeMat")


def test_the_names_of_ops_load_no_library_and_an_op_only_its_own():
    code = (
        "import sys; from penstock.pipeline.ops import catalog; catalog.names();"
        "catalog.find('Identity'); catalog.find('ArgMax');"
        "catalog.find('Python'); assert not {'cv2', 'PIL', 'simplejpeg', 'torch', 'onnxruntime'} & set(sys.modules);"
        "catalog.find('ResizeMat'); assert 'cv2' in sys.modules; assert 'PIL' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_class_of_a_python_op_is_its_target():
    assert catalog.class_of("ResizeMat", None) is catalog.find("ResizeMat")
    assert catalog.class_of("Identity", "json:dumps") is catalog.find("Identity")
    assert catalog.class_of("Python", "json:dumps").__name__ == "dumps"
