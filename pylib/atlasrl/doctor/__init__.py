"""Is this node fit to train? Small checks of one node, and a comparison of several.

report = examine(Host(), expected.of("npu"))      findings and facts of this node
differences([report, ...])                        what differs between nodes
findings("npu")                                   for the preflight stage
"""

from atlasrl.doctor.examination import checks, examine, findings
from atlasrl.doctor.expected import Expected
from atlasrl.doctor.finding import Fact, Finding, Report
from atlasrl.doctor.host import Host
from atlasrl.doctor.merge import differences

__all__ = ["Expected", "Fact", "Finding", "Host", "Report", "checks", "differences", "examine", "findings"]
