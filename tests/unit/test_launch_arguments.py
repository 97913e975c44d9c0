"""The command line of `samestep run`."""

import pytest
from samestep.launch.arguments import parse
from samestep.launch.plan import HostSlots


def test_everything_after_the_program_is_the_programs():
    operands = ("-n", "7", "--", "--raw", "x y", "", "--env", "A=B", "-m")
    options = parse(["-n", "2", "train.py", *operands])
    assert (options.n_ranks, options.program, options.arguments) == (2, "train.py", operands)
    assert not options.raw and not options.env


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        (["train.py", "1"], ["py", "-u", "train.py", "1"]),
        (["-m", "pkg.train", "1"], ["py", "-u", "-m", "pkg.train", "1"]),
        (["--module", "pkg.train"], ["py", "-u", "-m", "pkg.train"]),
        (["--no-python", "./train", "-x"], ["./train", "-x"]),
        (["--no_python", "./train"], ["./train"]),
        (["--", "-odd-name.py"], ["py", "-u", "-odd-name.py"]),
    ],
)
def test_command_of_each_rank(words, argv):
    assert parse(["-n", "1", *words]).rank_argv("py") == argv


@pytest.mark.parametrize("words", [["-n", "3"], ["-n3"]])
def test_forms_of_the_number(words):
    assert parse([*words, "x"]).n_ranks == 3


def test_hosts_tell_the_number():
    options = parse(["--hosts", "a:2,b", "--mpi", "x"])
    assert options.n_ranks == 3
    assert options.hosts == (HostSlots("a", 2), HostSlots("b", 1))
    assert parse(["--hosts=a:2,b:1", "-n", "3", "x"]).n_ranks == 3


def test_hosts_of_a_file(tmp_path, capsys):
    file = tmp_path / "hosts"
    file.write_text("a slots=2 max_slots=4\n\n# of another job: z\nb\nc:3  # big\nb\n")
    options = parse(["--hostfile", str(file), "x"])
    assert options.hosts == (HostSlots("a", 2), HostSlots("b", 2), HostSlots("c", 3))
    assert options.n_ranks == 7
    with pytest.raises(SystemExit):
        parse(["--hosts", "a", "--hostfile", str(file), "x"])
    assert "--hosts and --hostfile exclude each other" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "names no host"), ("a slots=two\n", "'two' ranks"), ("a:0\n", "'0' ranks"), (None, "No such file")],
)
def test_a_hostfile_that_cannot_be_read_is_named(tmp_path, capsys, text, message):
    file = tmp_path / "hosts"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit):
        parse(["--hostfile", str(file), "x"])
    error = capsys.readouterr().err
    assert message in error and str(file) in error


def test_a_run_on_each_of_several_nodes():
    words = ["-n", "3", "--nnodes=2", "--node_rank", "1", "--master-addr", "a", "x"]
    options = parse(words)
    assert (options.n_nodes, options.node_rank, options.first_rank) == (2, 1, 3)
    assert (options.master_addr, options.master_port) == ("a", 29500)
    assert parse(["--master-port=3", *words]).master_port == 3
    assert parse(["-n", "3", "x"]).master_port is None


def test_values(monkeypatch):
    monkeypatch.setenv("FROM_HERE", "here")
    variables = ["--env", "FROM_HERE", "--env", "A=b=c", "--env", "E="]
    options = parse(
        ["-n", "1", *variables, "--timeout=2.5", "--logs", "d", "--master_port", "80", "--raw", "x"]
    )
    assert options.env == {"FROM_HERE": "here", "A": "b=c", "E": ""}
    assert (options.timeout_s, options.logs, options.master_port, options.raw) == (2.5, "d", 80, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "what to run"),
        (["-n", "2"], "what to run"),
        (["train.py"], "how many ranks"),
        (["train.py", "-n", "2"], "flags stand before the program"),
        (["-np", "2", "train.py"], "there is no -np; the number of ranks is -n N"),
        (["--nproc_per_node=2", "train.py"], "the number of ranks is -n N"),
        (["-n", "0", "x"], "'0' is not a whole number above 0"),
        (["-n", "-2", "x"], "-n"),
        (["-n", "two", "x"], "'two'"),
        (["-n", "4", "--hosts", "a:2", "x"], "-n 4 and --hosts, which has room for 2, must agree"),
        (["--hosts", "a:0", "x"], "'0' ranks"),
        (["--hosts", "a,,b", "x"], "empty host name"),
        (["--hosts", "a:1,a:1", "x"], "occurs twice"),
        (["-n", "1", "-m", "--no-python", "x"], "exclude each other"),
        (["-n", "1", "--timeout", "0", "x"], "not a number of seconds above 0"),
        (["-n", "1", "--timeout", "inf", "x"], "not a number of seconds above 0"),
        (["-n", "1", "--env", "=1", "x"], "names no variable"),
        (["-n", "1", "--env", "SURELY_NOT_SET", "x"], "SURELY_NOT_SET=VALUE"),
        (["-n", "1", "--master-port", "70000", "x"], "not a port"),
        (["-n", "1", "--nnodes", "2", "x"], "--nnodes needs --master-addr"),
        (["-n", "1", "--nnodes", "2", "--node-rank", "2", "--master-addr", "a", "x"], "outside the 2 nodes"),
        (["--hosts", "a,b", "--nnodes", "2", "--master-addr", "a", "x"], "one run that starts them all"),
        (
            ["-n", "1", "--nnodes", "2", "--master-addr", "a", "--max-restarts", "1", "x"],
            "other nodes would not",
        ),
        (["--hosts", "a,b", "--rsh", "'", "x"], "not a command"),
        (["--hosts", "a,b", "--rsh", " ", "x"], "an empty command"),
        (["-n", "1", "--frobnicate", "x"], "--frobnicate"),
    ],
)
def test_wrong_command_lines_say_what_is_wrong(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("usage: samestep run") and message in printed


def test_help_names_every_exit_code(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(code in text for code in ("130", "143", "124", "128"))


def test_a_launcher_that_lets_others_join_and_one_that_does():
    assert parse(["-n", "2", "--min-ranks", "1", "--listen", "0", "x"]).listen == 0
    options = parse(
        ["-n", "2", "--join", "a:29400", "--env", "A=B", "-m", "x"], {"KUBERNETES_SERVICE_HOST": "h"}
    )
    assert (options.join, options.listen, options.env, options.kind) == (
        ("a", 29400),
        None,
        {"A": "B"},
        "module",
    )
    assert parse(["-n1", "--join=[fd78::1]:29400", "x"]).join == ("fd78::1", 29400)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--listen", "29400"], "--listen lets ranks join, and needs --min-ranks K"),
        (["--min-ranks", "1", "--listen", "65536"], "is not a port"),
        (["--join", "29400"], "'29400' is not an address as HOST:PORT"),
        (["--join", "a:"], "is not a port"),
        (["--join", "a:1", "--min-ranks", "1"], "--min-ranks is for the launcher of the job"),
        (["--join", "a:1", "--nnodes", "1"], "--nnodes is for the launcher of the job"),
        (["--join", "a:1", "--logs", "x"], "--logs is for the launcher of the job"),
        (["--join", "a:1", "--hosts", "a,b"], "--hosts is for the launcher of the job"),
    ],
)
def test_flags_that_do_not_join(words, message, capsys):
    with pytest.raises(SystemExit) as end:
        parse(["-n", "2", *words, "x"])
    assert end.value.code == 2
    assert message in capsys.readouterr().err
