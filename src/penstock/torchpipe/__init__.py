"""TorchPipe's names, as its users import them, over Penstock's pipelines.

`install()` makes `import torchpipe` find this package too. See docs/migrate-from-torchpipe.md.
"""

from __future__ import annotations

from penstock._version import __version__ as __version__
from penstock.torchpipe import utils as utils
from penstock.torchpipe.events import Event as Event
from penstock.torchpipe.naming import absent
from penstock.torchpipe.naming import install as install
from penstock.torchpipe.pipes import parse_toml as parse_toml
from penstock.torchpipe.pipes import pipe as pipe
from penstock.torchpipe.registry import Status as Status
from penstock.torchpipe.registry import is_registered as is_registered
from penstock.torchpipe.registry import list_backends as list_backends
from penstock.torchpipe.registry import register_backend as register_backend
from penstock.torchpipe.registry import register_filter as register_filter

TASK_DATA_KEY = "data"
TASK_RESULT_KEY = "result"
TASK_BOX_KEY = "_box"
TASK_INFO_KEY = "_info"
TASK_CONTEXT_KEY = "context"
TASK_EVENT_KEY = "event"
TASK_NODE_NAME_KEY = "node_name"

Pipe = pipe

Interpreter = absent("Interpreter")
encrypt = absent("encrypt")
infer_shape = absent("infer_shape")
supported_opset = absent("supported_opset")
show = absent("show")
ThreadSafeKVStorage = absent("ThreadSafeKVStorage")
ThreadSafeDict = absent("ThreadSafeDict")
Any = absent("Any")
Dict = absent("Dict")
