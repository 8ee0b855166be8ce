"""No file of ours makes code of data, runs a shell, or loads what may be a program."""

import pytest

from tests.support.audit import imported_by_name, problems, problems_of_files, puts_sql_together
from tests.unit.test_layers import ROOT, module_name, source_files

IMPORTERS = {
    "worker_agent.blocks.engines.nixl_agent",
    "worker_agent.integrations",
    "worker_agent.training.load",
    "worker_agent.training.trackers",
}
"""They import a module by a name that is given: one of a fixed list, and the task that the run file names."""

SQL_WRITERS = {"coordinator_service.sql_store"}
"""They put names of tables and conditions of their own into SQL; values are parameters there too."""


def test_no_file_does_what_it_must_not():
    files = [*source_files(), *sorted((ROOT / "scripts").glob("*.py"))]
    assert len(files) > 100
    assert problems_of_files(files) == {}


def test_modules_are_imported_by_name_where_it_is_meant():
    assert {module_name(path) for path in source_files() if imported_by_name(path.read_text())} == IMPORTERS


def test_sql_is_put_together_where_it_is_meant():
    assert {module_name(path) for path in source_files() if puts_sql_together(path.read_text())} == SQL_WRITERS
    assert puts_sql_together("query = f'SELECT * FROM t WHERE a = {a}'")
    assert not puts_sql_together("log.info(f'SELECTED {a}', 'SELECT 1')")


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "def f():\n    import shelve",
        "from joblib.externals import cloudpickle",
        "eval(text)",
        "exec(text)",
        "compile(text, '', 'exec')",
        "__import__(name)",
        "import os\nos.system(text)",
        "os.popen(text)",
        "subprocess.run(text, shell=True)",
        "subprocess.Popen(text, shell=wanted)",
        "run(text, shell=1)",
        "subprocess.getoutput(text)",
        "tempfile.mktemp()",
        "yaml.load(text)",
        "yaml.load(text, yaml.Loader)",
        "yaml.load(text, Loader=yaml.FullLoader)",
        "class L(yaml.Loader): pass\nyaml.load(text, L)",
        "class L(yaml.SafeLoader, yaml.Loader): pass\nyaml.load(text, L)",
        "yaml.load(text, unknown)",
        "yaml.unsafe_load(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "numpy.load(path, allow_pickle=True)",
        "load(path, trust_remote_code=True)",
        "get(url, verify=False)",
        "ssl._create_unverified_context()",
        "connection.execute(f'DELETE FROM t WHERE a = {a}')",
        "connection.execute('SELECT * FROM t WHERE a = ' + a)",
        "connection.execute('SELECT * FROM t WHERE a = %s' % a)",
        "connection.execute('SELECT {}'.format(a))",
    ],
)
def test_the_audit_finds(source: str):
    assert problems(source)


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "re.compile(text)",
        "subprocess.run([a, b])",
        "subprocess.run([a, b], shell=False)",
        "yaml.load(text, yaml.SafeLoader)",
        "yaml.load(text, Loader=CSafeLoader)",
        "class L(yaml.SafeLoader): pass\nyaml.load(text, L)",
        "yaml.safe_load(text)",
        "torch.load(path, weights_only=True)",
        "connection.execute('DELETE FROM t WHERE a = ?', (a,))",
        "log.info(f'selected {a}')",
        "get(url, verify=True)",
    ],
)
def test_the_audit_lets_pass(source: str):
    assert problems(source) == []
