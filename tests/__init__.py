"""Before anything is imported: torch and OpenBLAS share nothing out to threads, which spin as they
wait for toys. The other cores belong to other workers."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
