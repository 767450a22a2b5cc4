"""The front door: small, quick, and honest about faults."""

from __future__ import annotations

import subprocess
import sys


def python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return result.stdout.strip()


def test_help_loads_neither_torch_nor_pyarrow() -> None:
    heavy = python(
        "import sys, regionprep.cli as cli\n"
        "try:\n    cli.app(['--help'])\nexcept SystemExit:\n    pass\n"
        "print('heavy:', sorted({'torch', 'pyarrow', 'numpy', 'rich'} & set(sys.modules)))"
    )
    assert heavy.endswith("heavy: []")


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = "sorted({'torch', 'pyarrow', 'numpy', 'pydantic'} & set(sys.modules))"
    assert python(f"import sys, regionprep; print({heavy})") == "[]"


def test_a_reader_loads_no_torch() -> None:
    assert (
        python("import sys; from regionprep import FeatureStore; print('torch' in sys.modules)")
        == "False"
    )


def test_importing_the_package_takes_less_than_a_fifth_of_a_second() -> None:
    code = (
        "import time; begun = time.process_time(); import regionprep;"
        "print(time.process_time() - begun)"
    )
    assert min(float(python(code)) for _ in range(3)) < 0.2


def test_public_names_are_pinned() -> None:
    import regionprep

    assert sorted(regionprep.__all__) == ["FeatureStore", "JoinedStore", "__version__"]
    assert all(getattr(regionprep, name) for name in regionprep.__all__)
