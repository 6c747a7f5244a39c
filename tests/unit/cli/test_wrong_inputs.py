"""What users write by mistake: each command line ends with status 2, and says what to write instead."""

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli.main import main

ONE = "class Good:\n    def predict(self, items): return items\n"
TWO = "class Cat:\n    def predict(self, items): ...\nclass Dog:\n    def predict(self, items): ...\n"
FILES = {
    "one.py": ONE,
    "two.py": TWO,
    "broken.py": "def f(:",
    "empty.py": "X = 1",
    "ok.toml": '[models.a]\ntarget = "one.py:Good"\n',
    "more.toml": '[models.b]\ntarget = "one.py:Good"\n',
    "typo.toml": '[server]\nprot = 1\n[models.my.model]\ntarget = "one.py:Good"\n',
    "batching.toml": '[batching]\nmax_batch_size = 4\n[models.b]\ntarget = "one.py:Good"\n',
    "not.toml": "server = 3",
    "open.toml": '[server]\nhost = "0.0.0.0"\n',
    "models/resnet.mar": "",
    "flow.war": "",
    "net.h5": "",
    "net.safetensors": "",
    "net.onnx": "",
    "config.yaml": "a: 1",
}
COMMANDS = (
    "serve", "worker", "config check", "bench", "tune", "simulate", "compare", "benchmark-suite", "caption", "archive",
    "pipeline check", "pipeline run", "pipeline ops", "demo",
)  # fmt: skip
ROWS = (
    # TARGETs
    ("serve", "nothing to serve: name a TARGET such as app.py:Model, model.onnx or penstock.toml"),
    ("serve one.Good", "TARGET 'one.Good' names no object; did you mean one:Good?"),
    ("serve one", "TARGET 'one' names no object; did you mean one.py?"),
    ("serve one.py:", "TARGET 'one.py:' names no object; did you mean one.py?"),
    ("serve :Good", "TARGET ':Good' must be app.py, app.py:obj"),
    ("serve Good", "TARGET 'Good' must be app.py, app.py:obj"),
    ("serve missing.py", "TARGET 'missing.py' cannot be read: No such file or directory"),
    ("serve .", "TARGET '.' is a folder; name a file in it, such as app.py or model.onnx"),
    ("serve models", "TARGET 'models' is a folder"),
    (
        "serve models/resnet.mar",
        "is an archive of TorchServe; write penstock torchserve --start --foreground --model-store models --models"
        " resnet.mar",
    ),
    ("serve x.mar", "TARGET 'x.mar' is an archive of TorchServe"),
    ("serve flow.war", "TARGET 'flow.war' is an archive of TorchServe"),
    ("serve net.h5", "TARGET 'net.h5' is a .h5 file, which no runtime opens; load it in a class"),
    ("serve net.safetensors", "is a .safetensors file, which no runtime opens"),
    ("serve config.yaml", "TARGET 'config.yaml' is a .yaml file, which no runtime opens"),
    ("serve org/model", "a class loads a model of a hub: write penstock serve app.py:Model --model org/model"),
    ("serve meta-llama/Llama-3.2-1B", "--model meta-llama/Llama-3.2-1B"),
    ("serve https://a.b/net.onnx", "TARGET 'https://a.b/net.onnx' is a URL; download the file and name that"),
    ("serve hf://org/model", "is a URL"),
    ("serve s3://bucket/app.py:Good", "is a URL"),
    ("serve broken.py", "TARGET 'broken.py' is not valid Python: invalid syntax (broken.py, line 1)"),
    ("serve empty.py", "it has no class and no function; write for instance empty.py:Model"),
    ("serve two.py", "TARGET 'two.py' has the models Cat, Dog; name one: two.py:Cat"),
    ("serve one.py one.py", "two models are named 'good'; name one with NAME=one.py:Good"),
    ("serve one.py:Good two.py:GOOD", "two models are named 'good'; name one with NAME=two.py:GOOD"),
    ("serve ok.toml more.toml", "one TOML file at most, found 'ok.toml' and 'more.toml'; merge them"),
    ("serve missing.toml", "missing.toml: no such file; expected a TOML file"),
    ("serve not.toml", "not.toml: server: found 3, expected a table"),
    ("serve typo.toml", "server: unknown key 'prot'; did you mean 'port'?"),
    ("serve typo.toml", "models.my: unknown key 'model'; known are target,"),
    ("serve typo.toml", 'for a name with a dot write models."my.model"'),
    ("serve batching.toml", "unknown section 'batching'; did you mean models.NAME.batching?"),
    # options
    ("serve one.py --log-level debug", "No such option '--log-level'. Write --set logging.level=debug."),
    ("serve one.py --debug", "Write --set logging.level=debug."),
    ("serve one.py --pory 9000", "'--port'?"),
    ("serve one.py --batch-size 4", "Did you mean '--max-batch-size'?"),
    ("serve one.py --port 99999", "Invalid value for '--port': 99999 is not in the range 0<=x<=65535."),
    ("serve one.py --port abc", "Invalid value for '--port': 'abc' is not a valid"),
    ("serve one.py --instances 0", "expected a whole number from 1, or auto, found '0'"),
    ("serve one.py --max-batch-size=-1", "expected a whole number from 1, or auto, found '-1'"),
    ("serve ok.toml --instances 2", "for those of ok.toml use --set models.NAME.KEY=..."),
    ("serve ok.toml --model x", "--option is for models named on the command line"),
    ("serve ok.toml --max-batch-size 4", "--max-batch-size is for models named on the command line"),
    ("serve one.py --devices gpu", "devices: found 'gpu', expected for example cpu, cuda (all GPUs), cuda:0"),
    ("serve one.py --devices 0", "devices: found '0', expected for example cpu, cuda (all GPUs), cuda:0"),
    ("serve one.py --option x", "--option x: found no NAME=VALUE; expected for instance --option max_new_tokens=12"),
    ("serve one.py --host 0.0.0.0", "which other machines can reach, while nothing guards the inference listener"),
    ("serve one.py --host a..b", "found 'a..b', which is no address of this machine"),
    ("serve one.py --token-file missing", "auth.token_file: no such file: missing"),
    ("serve one.py --tls-cert missing", "server.tls_cert: found without server.tls_key; set both, or neither"),
    # --set
    ("serve one.py --set max_batch_size=4", "did you mean models.NAME.batching.max_batch_size?"),
    ("serve one.py --set models.good.max_batch_size=4", "did you mean models.NAME.batching.max_batch_size?"),
    ("serve one.py --set port=9000", "unknown section 'port'; did you mean server.port?"),
    ("serve one.py --set server.prot=1", "server: unknown key 'prot'; did you mean 'port'?"),
    ("serve one.py --set server.port", "found no KEY=VALUE; expected for example --set server.port=9000"),
    ("serve one.py --set server.port=x", "server.port: found the string 'x', expected a whole number from 0 to 65535"),
    ("serve one.py --set models.god.instances=2", "models.god: found no target; did you mean 'good'?"),
    # other commands
    ("serv one.py", "there is no command 'serv'; did you mean 'serve'?"),
    ("config check typo.toml", "server: unknown key 'prot'; did you mean 'port'?"),
    ("config check open.toml", "or say --insecure if a guard stands elsewhere"),
    ("bench localhost:8080", "did you mean 'http://localhost:8080'?"),
    ("tune one.py --slo fast", 'SLO part "fast": expected NAME<=LIMIT'),
    ("caption", "no videos are named"),
    ("demo --prot", "Did you mean '--port'?"),
    *((f"{command} --no-such-flag", "No such option") for command in COMMANDS),
    *((line, "") for line in (
        "serve one.py:Good --devices cuda:77", "worker none --redis localhost:1", "worker one.py:Good --redis :::",
        "worker one.py:Good --set x=1", "config check none.toml", "bench none.toml", "tune none.toml",
        "simulate --arrivals none:1", "compare none none", "benchmark-suite none.toml", "pipeline check none.toml",
        "pipeline check typo.toml", "pipeline ops NoSuchOp", "caption none.mp4 --output out",
    )),
)  # fmt: skip


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[int, str]]:
    folder = tmp_path_factory.mktemp("wrong")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    def run(line: str) -> tuple[int, str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            result = CliRunner().invoke(main, shlex.split(line))
        return result.exit_code, result.stderr

    return run


@pytest.mark.parametrize(("line", "told"), ROWS, ids=lambda text: text[:60])
def test_a_wrong_command_line_says_what_to_write(said: Callable[[str], tuple[int, str]], line: str, told: str) -> None:
    code, stderr = said(line)
    assert told in stderr
    assert (code, "Traceback" in stderr) == (2, False)


def test_a_package_of_the_same_command_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """TorchServe's packages and Penstock bring commands of the same names, and pip keeps the ones that came last."""
    from penstock.torchserve.cli.archive import archive

    record = tmp_path / "torch_model_archiver-0.12.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-model-archiver\nVersion: 0.12.0\n")
    words = shlex.split(f"--model-name m --version 1 --handler image_classifier --export-path {tmp_path}")
    warning = "torch-model-archiver: this is Penstock's command, which replaced that of torch-model-archiver 0.12.0"
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, expected in (("torch-model-archiver", True), ("torch-workflow-archiver", False), ("penstock", False)):
        monkeypatch.setattr("sys.argv", [f"/usr/bin/{name}"])
        told = CliRunner().invoke(archive, [*words, "--force"])
        assert (told.exit_code, warning in told.stderr) == (0, expected)
