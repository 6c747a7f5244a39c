"""What TorchServe's handlers import as `ts`: the names, arguments and results of its release 0.12.0.

Workers find these modules as `ts...`, unless TorchServe itself is installed. Importing one loads no torch unless the
module is of no use without it.
"""

__version__ = "0.12.0"
