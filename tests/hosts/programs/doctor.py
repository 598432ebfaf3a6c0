"""`elastane doctor` without the import of torch, which takes seconds and is not tested here."""

import sys

from elastane.cli.main import main
from elastane.doctor import facts

facts.read_torch = lambda environ: facts.TorchFacts(version="2.13.0+cpu", import_s=2.0)
sys.exit(main(["doctor", *sys.argv[1:]]))
