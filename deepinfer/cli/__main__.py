"""`python -m deepinfer.cli`, for where the `deepinfer` script is not on the path."""

import sys

from deepinfer.cli.main import main

sys.exit(main())
