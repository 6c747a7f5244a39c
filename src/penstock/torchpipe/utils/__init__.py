"""torchpipe.utils: `test` measures functions, `models` exports networks; `cpp_extension` has stand-ins."""

from penstock.torchpipe.utils import cpp_extension as cpp_extension
from penstock.torchpipe.utils import models as models
from penstock.torchpipe.utils import test as test
