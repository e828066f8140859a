"""`ray start` without the server for remote Ray clients: `python -m atlasrl.raystart --head ...`.

No option of `ray start` leaves that server out where grpc is installed (Ray 2.60 ray/scripts/scripts.py: no port means
10001, and 0 is refused). Nobody here uses it, it runs code for whoever reaches its port, and it costs 90 MB and two
seconds of CPU at each start. `ray start` asks one function whether such a server could run; here the answer is no.
"""

from __future__ import annotations

import sys

import ray
from ray.scripts import scripts

QUESTION = "get_ray_client_dependency_error"


def main() -> None:
    if hasattr(scripts, QUESTION):
        setattr(scripts, QUESTION, lambda: "not wanted in a batch job")
    else:
        print(f"warning: Ray {ray.__version__} has no {QUESTION}: its client server listens, by default on port 10001")
    sys.exit(scripts.start(prog_name="ray start"))


if __name__ == "__main__":
    main()
