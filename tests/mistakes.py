"""What the checker of Lab 2 or 3 says of the library's own code, or of a mistake that its tests know.

    python tests/mistakes.py 2                         the library's own code in the blanks
    python tests/mistakes.py 2 "slice one row late"    a mistake
    python tests/mistakes.py 3 --list                  their names

(It needs what the tests need: pip install -r requirements-dev.txt.)
"""

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

try:
    import test_labs
    import test_labs3
except ModuleNotFoundError as error:
    print(f"mistakes.py: {error.name} is missing; pip install -r requirements-dev.txt", file=sys.stderr)
    sys.exit(2)


def main(lab=None, name=None):
    labs = {"2": (test_labs.WRONG2, test_labs.check2, two), "3": (test_labs3.WRONG3, test_labs3.check3, three)}
    if lab not in labs:
        sys.exit(__doc__)
    names, checker, make = labs[lab]
    if name == "--list":
        return print("\n".join(names))
    if name and name not in names:
        sys.exit(f"mistakes.py: {name!r} is none of them; `python tests/mistakes.py {lab} --list` prints their names")
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(checker.main(make(Path(folder), name)))


def two(folder, name):
    change = dict([test_labs.WRONG2[name][:2]]) if name else {}
    return test_labs.filled(folder, "lab2", test_labs.RIGHT2 | change)


def three(folder, name):
    return test_labs3.lab3(folder, test_labs.mutant(*test_labs3.WRONG3[name][1] if name else ()))


if __name__ == "__main__":
    main(*sys.argv[1:3])
