"""How long a run of the tests took: phases, groups, and each test, the slowest first.

    python3 tests/times.py PHASES JUNIT...

PHASES has a line for each phase, its name and its seconds with a tab between; JUNIT are what the runner wrote. What
stands before the first empty line is short."""

import sys
import xml.etree.ElementTree as ElementTree

SLOWEST = 20

phases = [line.rstrip("\n").split("\t") for line in open(sys.argv[1], encoding="utf-8")]
print("seconds  phase")
for name, seconds in phases:
    print(f"{float(seconds):7.1f}  {name}")

tests, groups = [], {}
for path in sys.argv[2:]:
    for suite in ElementTree.parse(path).getroot().iter("testsuite"):
        for case in suite.iter("testcase"):
            name, seconds = suite.get("name"), float(case.get("time"))
            tests.append((seconds, f"{name} {case.get('name')}"))
            count, total = groups.get(name, (0, 0.0))
            groups[name] = (count + 1, total + seconds)
tests.sort(reverse=True)
if tests:
    print("seconds  of how many tests, one after the other")
    for name, (count, total) in sorted(groups.items(), key=lambda group: -group[1][1]):
        print(f"{total:7.1f}  {count:5d} {name}")
    print(f"seconds  the {min(SLOWEST, len(tests))} slowest tests")
    for seconds, name in tests[:SLOWEST]:
        print(f"{seconds:7.1f}  {name}")
print()
for seconds, name in tests:
    print(f"{seconds:7.1f}  {name}")
