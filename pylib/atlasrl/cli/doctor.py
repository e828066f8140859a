"""Is this node, or every node of a site, fit to train?"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click

from atlasrl.cli import command


@command
@click.option("--device", type=click.Choice(["npu", "cpu", "cuda"]), help="Default: npu where /dev/davinci0 is.")
@click.option("--stack", "stack_name", help="For npu: a name in env/stacks. Default: the recipes' default.")
@click.option("--devices", type=click.IntRange(min=1), help="Devices per node. Default: the stack's.")
@click.option("--site", "site_name", help="Cluster: a name in jobs/sites or a YAML file; names interface and folders.")
@click.option("--nodes", "-N", type=click.IntRange(min=1), help="Examine so many nodes of the site at once.")
@click.option("--nic", help="Network interface. Default: the site's.")
@click.option("--path", "paths", multiple=True, help="Folder that every node must see; repeatable.")
@click.option("--without", multiple=True, metavar="CHECK", help="Leave a check out, such as imports; repeatable.")
@click.option("--merge", is_flag=True, help="Read reports (--json) from standard input and compare the nodes.")
@click.option("--all", "show_all", is_flag=True, help="Also what is right.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON.")
def main(device, stack_name, devices, site_name, nodes, nic, paths, without, merge, show_all, as_json):
    """Examine this node, or all nodes of a site, and say what is wrong and what to do.

    \b
    bin/doctor                              this node
    bin/doctor --site my-cluster.yaml -N 32 32 nodes through Slurm or ssh, and where they differ
    cat reports/*.json | bin/doctor --merge reports of nodes that were examined one by one

    Exit code 0: no error (there may be warnings); 1: an error; 2: the request cannot be served.
    """
    from atlasrl import doctor
    from atlasrl import site as sites
    from atlasrl.doctor import examination, expected, report
    from atlasrl.doctor import nodes as many
    from atlasrl.errors import UsageFault
    from atlasrl.site import Site

    device = device or ("npu" if Path("/dev/davinci0").exists() else "cpu")
    examination.refuse_unknown(without, device)
    site = sites.load(site_name) if site_name else Site()
    nic = nic or site.nic
    folders = [*(Path(path).absolute() for path in paths), *([site.runs] if site.runs else []), *site.shared]
    if merge:
        reports = many.read_reports(sys.stdin.read())
        if not reports:
            raise UsageFault("no report on standard input; make one on each node with bin/doctor --json")
    elif nodes or site.kind == "ssh":
        words = {
            "device": [device],
            "stack": [stack_name],
            "devices": [devices],
            "nic": [nic],
            "path": folders,
            "without": without,
        }
        options = [
            word for name, values in words.items() for value in values if value for word in (f"--{name}", str(value))
        ]
        reports = many.examine_nodes(site, nodes, str(site.python or sys.executable), os.environ["PYTHONPATH"], options)
    else:
        wanted = expected.of(device, stack_name=stack_name, devices=devices, nic=nic, paths=tuple(folders))
        reports = [doctor.examine(doctor.Host(), wanted, without=without)]
    between = doctor.differences(reports)
    click.echo(json.dumps(report.as_dict(reports, between)) if as_json else report.text(reports, between, show_all))
    sys.exit(1 if between or any(one.failed for one in reports) else 0)


if __name__ == "__main__":
    main(prog_name="bin/doctor")
