"""TorchPipe's Python API over Penstock's pipelines.

After `install()`, `import torchpipe` also loads this package. See docs/migrate-from-torchpipe.md.
"""

from penstock._version import __version__ as _penstock
from penstock.torchpipe import utils as utils
from penstock.torchpipe.boundary import Event as Event
from penstock.torchpipe.boundary import Status as Status
from penstock.torchpipe.boundary import install as install
from penstock.torchpipe.boundary import is_registered as is_registered
from penstock.torchpipe.boundary import list_backends as list_backends
from penstock.torchpipe.boundary import register_backend as register_backend
from penstock.torchpipe.boundary import register_filter as register_filter
from penstock.torchpipe.boundary import unavailable
from penstock.torchpipe.pipes import Interpreter as Interpreter
from penstock.torchpipe.pipes import parse_toml as parse_toml
from penstock.torchpipe.pipes import pipe as pipe
from penstock.torchpipe.utils.models import infer_shape as infer_shape

__version__ = f"0.9.9+penstock{_penstock}"
"""Above the releases of TorchPipe's frozen branch, because programs compare it as a text with "0.2.2b1"."""

TASK_DATA_KEY = "data"
TASK_RESULT_KEY = "result"
TASK_BOX_KEY = "_box"
TASK_INFO_KEY = "_info"
TASK_CONTEXT_KEY = "context"
TASK_EVENT_KEY = "event"
TASK_NODE_NAME_KEY = "node_name"

Pipe = pipe
Dict = dict  # the present branch wraps items in it

encrypt = unavailable("encrypt")
supported_opset = unavailable("supported_opset")
show = unavailable("show")
ThreadSafeKVStorage = unavailable("ThreadSafeKVStorage")
ThreadSafeDict = unavailable("ThreadSafeDict")
Any = unavailable("Any")
