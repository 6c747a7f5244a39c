from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import BadRequest, ConfigError
from penstock.pipeline.ops.mat import SaveMat, cv2


def test_an_image_is_written_and_passed_on(tmp_path, rgb):
    op = SaveMat(str(tmp_path))
    assert op(rgb, {}) is rgb
    (path,) = tmp_path.iterdir()
    assert np.array_equal(cv2.imread(str(path)), rgb)


def test_floats_are_cut_to_what_a_png_holds(tmp_path):
    SaveMat(str(tmp_path))(np.array([[-5.0, 3.7, 999.0]], np.float32), {})
    (path,) = tmp_path.iterdir()
    assert cv2.imread(str(path), cv2.IMREAD_GRAYSCALE).tolist() == [[0, 3, 255]]


def test_two_instances_overwrite_neither_each_other_nor_what_is_there(tmp_path, rgb):
    ops = [SaveMat(str(tmp_path)), SaveMat(str(tmp_path))]
    ops[0](rgb, {})
    (first,) = tmp_path.iterdir()
    process, number = first.stem.split("_")
    there = tmp_path / f"{process}_{int(number) + 1:06d}.png"
    there.write_bytes(b"mine")
    for op in ops:
        op(rgb, {})
    assert there.read_bytes() == b"mine"
    assert len(list(tmp_path.iterdir())) == 4


def test_fields_of_an_item_do_not_set_the_directory(tmp_path, rgb):
    (tmp_path / "in").mkdir()
    SaveMat(str(tmp_path / "in"))(rgb, {"node_name": "../out", "save_dir": str(tmp_path)})
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_missing_directory_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"save_dir = .* is not a directory: create it first"):
        SaveMat(str(tmp_path / "none"))


def test_an_invalid_image_is_not_written(tmp_path):
    with pytest.raises(BadRequest, match="SaveMat found bytes"):
        SaveMat(str(tmp_path))(b"bytes", {})
    assert not list(tmp_path.iterdir())
