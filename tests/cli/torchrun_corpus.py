"""Correct and wrong command lines of torchrun, as `(entry, argv, variables)`.

The cases are systematic for every option of torchrun, random from a fixed seed, and a list by hand.
They are independent of our own table, so that an option missing there makes a test fail.
"""

import random

FLAGS = ("standalone", "module", "no-python", "run-path", "virtual-local-rank")
# Option: values that torchrun accepts.
VALUES = {
    "nnodes": ("2", "1:4"),
    "nproc-per-node": ("2", "cpu"),
    "rdzv-backend": ("c10d", "static"),
    "rdzv-endpoint": ("host1:29400", "localhost:0"),
    "rdzv-id": ("job-7", "7"),
    "rdzv-conf": ("join_timeout=60,last_call_timeout=5", "timeout=900"),
    "max-restarts": ("3", "0"),
    "monitor-interval": ("5", "0.5"),
    "start-method": ("fork", "forkserver"),
    "event-log-handler": ("null",),
    "role": ("trainer",),
    "log-dir": ("logs", "/dev/null"),
    "redirects": ("3", "0:1,1:2"),
    "tee": ("1", "0:3"),
    "local-ranks-filter": ("0", "0,1"),
    "duplicate-stdout-filters": ("apple", "a,,b,c"),
    "duplicate-stderr-filters": ("orange",),
    "node-rank": ("1", "0"),
    "master-addr": ("10.0.0.1",),
    "master-port": ("1234",),
    "local-addr": ("10.0.0.2",),
    "logs-specs": ("default",),
    "numa-binding": ("node",),
    "signals-to-handle": ("SIGTERM,SIGUSR2",),
    "shutdown-timeout": ("7",),
}
SHORT = {"redirects": "r", "tee": "t", "module": "m"}
NUMBERS = ("max-restarts", "node-rank", "master-port", "monitor-interval", "shutdown-timeout")
SCRIPT = "train.py"

# Bars and line ends separate words. '' is an empty word, ~ a blank in a word.
BY_HAND = """
|--|-- train.py|-- train.py --x|-- train.py -- --x|-- -- train.py|--nnodes 2 -- train.py a|--nnodes
train.py|train.py -- --lr 1|train.py -- -- x|train.py a -- b|train.py --|train.py --nnodes 3
train.py -m --standalone|train.py -h|train.py --help|train.py -1|train.py '' x|'' a|-1|-1 train.py
-1.5 train.py|- train.py|-|-- -m|-x train.py|-x~y train.py|--x~y train.py|---nnodes 2 train.py
-h|--help|--hel|--h|--he train.py|--nnodes 2 -h|-mh|--nnodes -h
-m pkg.mod|-m pkg.mod --lr 0.1|-mr3 pkg|-mt 3 pkg|-mr 3 -t1 pkg|-mpkg|-mpkg train.py|-mm pkg
-m -m pkg
-r 3 -t3 train.py|-r3 -t 3 train.py|-r=3 train.py|-r= train.py|-r '' train.py|-r -t train.py
-r0:1 train.py|-r 0:3,1:2 --nproc-per-node 2 train.py|-tee 3 train.py|-rt train.py|-r -1 train.py
-rdzv-id=7 train.py|-nnodes 2 train.py|-nproc_per_node=2 train.py|-standalone train.py
--standalone=1 train.py|--standalone= train.py|--module=pkg train.py|--standalone 1 train.py
--no-python=x train.py|--help=x train.py
--nnodes=2=3 train.py|--nnodes==2 train.py|--=2 train.py|--role a=b train.py|--role=--x train.py
--role --x train.py|--role -x train.py|--role -1 train.py|--role -1.5 train.py|--role -1e5 train.py
--role -x~y train.py|--role --x~y train.py|--role=-x train.py|--role - train.py|--role -- train.py
--role --standalone train.py|--role -m train.py|--role -r3 train.py|--role --role=x train.py
--role --tee~x train.py|--role -m~x train.py|--role --stand train.py|--role --rdzv train.py
--role '' train.py|--role= train.py|--log-dir= train.py|--rdzv-id= train.py|--rdzv-id '' train.py
--nnodes 1:2:3 train.py|--nnodes 0 train.py|--nnodes -1 train.py|--nnodes 2:1 train.py
--nnodes : train.py|--nnodes 1: train.py|--nnodes :2 train.py|--nnodes x train.py|--nnodes= train.py
--nnodes 0:2 train.py|--nnodes 1:1 train.py|--nnodes ~1 train.py|--nnodes 1~:~2 train.py
--nnodes 1.5 train.py|--nnodes 1,2 train.py|--nnodes=-1 train.py|--nnodes +1 train.py
--nproc-per-node two train.py|--nproc-per-node= train.py|--nproc-per-node 2.0 train.py
--nproc-per-node auto train.py|--nproc-per-node gpu train.py|--nproc-per-node CPU train.py
--nproc-per-node ~2 train.py|--nproc-per-node 0x2 train.py|--nproc-per-node=+2 train.py
--max-restarts -1 train.py|--max-restarts=-1 train.py|--max-restarts 1.5 train.py
--max-restarts 1_0 train.py|--max-restarts 0x1 train.py|--max-restarts +3 train.py
--max-restarts x train.py|--max-restarts '' train.py|--max-restarts 1e1 train.py
--monitor-interval nan train.py|--monitor-interval inf train.py|--monitor-interval 1e-3 train.py
--monitor-interval x train.py|--monitor-interval '' train.py|--monitor-interval .5 train.py
--shutdown-timeout 2.5 train.py|--shutdown-timeout x train.py|--shutdown-timeout 0 train.py
--shutdown-timeout -1 train.py|--shutdown-timeout nan train.py|--shutdown-timeout 1e1 train.py
--master-port x train.py|--master-port 0 train.py|--master-port -1 train.py
--master-port 1.0 train.py
--node-rank x train.py|--node-rank 0 train.py|--node-rank 1.0 train.py
--start-method thread train.py|--start-method SPAWN train.py|--start-method= train.py
--numa-binding cpu train.py|--numa-binding core-complex train.py|--numa-binding exclusive train.py
--redirects 4 train.py|--redirects x train.py|--redirects 0:4 train.py|--redirects 0: train.py
--redirects 0:1:2 train.py|--redirects :1 train.py|--redirects 0:1, train.py|--tee -1 train.py
--redirects 0:1,0:2 train.py|--tee 10:1 --nproc-per-node 12 train.py|--tee 3,1 train.py
--tee 0:1,11:3 --nproc-per-node 12 train.py|--tee 00:1 train.py|--tee 1:3 train.py
--local-ranks-filter x train.py|--local-ranks-filter 0, train.py|--local-ranks-filter -1 train.py
--local-ranks-filter 0,,1 train.py|--local-ranks-filter 0:1 train.py|--local-ranks-filter , train.py
--local-ranks-filter= train.py|--local-ranks-filter 0,~1 train.py|--local-ranks-filter 0-1 train.py
--rdzv-conf a train.py|--rdzv-conf a=b=c train.py|--rdzv-conf ,a=1 train.py|--rdzv-conf =1 train.py
--rdzv-conf= train.py|--rdzv-conf join_timeout= train.py|--rdzv-conf join_timeout=5, train.py
--duplicate-stdout-filters= train.py|--duplicate-stdout-filters ,, train.py
--duplicate-stdout-filters a,,,b train.py|--duplicate-stderr-filters a,,b,,,,c train.py
--no-python -m train.py|--no-python sh -c x|--no-python --run-path train.py|--run-path -m train.py
--run-path train.py -- --x|--no-python sh -- -c|--no-python -- sh -c x
--max-restarts x --max-restarts 1 train.py|--start-method x --start-method fork train.py
--nnodes 2 --nnodes 1 train.py|--standalone --standalone train.py|-r 1 -r 2 train.py
--no-such train.py|--no-such=1 train.py|--nnode_s 2 train.py|--NNODES 2 train.py
--Standalone train.py
--nproc-per_node 2 train.py|--nproc_per-node=2 train.py|--rdzv_conf=a=1 train.py
--max-restart 1 train.py
--rdzv-ba c10d train.py|--rdzv train.py|--rdzv_b=c10d train.py|--rdzv-e=h train.py
--rdzv- x train.py
--no train.py|--no- sh|--no_ sh|--n 2 train.py|--nn 2 train.py|--np=2 train.py|--nod=1 train.py
--m train.py|--ma 1 train.py|--max 1 train.py|--mas x train.py|--mo train.py|--mon=1 train.py
--master train.py|--master-p=1 train.py|--master_a x train.py|--l x train.py|--lo x train.py
--log train.py|--log-d x train.py|--logs x train.py|--local x train.py|--local-a x train.py
--t 3 train.py|--te=3 train.py|--s train.py|--st train.py|--sta train.py|--stan train.py
--start fork train.py|--si SIGTERM train.py|--sh=3 train.py|--r 3 train.py|--re 3 train.py
--ro x train.py
--ru train.py|--v train.py|--e null train.py|--d x train.py|--duplicate x train.py
--duplicate-stdo=x train.py|--nu node train.py|--nproc 2 train.py|--node 0 train.py|--no-p sh
--node-id x train.py|--token x train.py|--tls x train.py|--co x train.py|--js train.py
--pr x train.py
--nproc-per-node=2 --nnodes=1 --standalone train.py --arg1 --arg2=x y
--nnodes=1:4 --nproc-per-node=2 --rdzv-id=1 --rdzv-backend=c10d --rdzv-endpoint=h train.py
--nproc_per_node 2 --node_rank=0 --master_addr=10.0.0.1 --master_port=1234 --nnodes 2 train.py --a
train.py --log x|train.py --local|train.py --rdzv x|train.py --nod 1|train.py --no-such-flag
train.py --role|train.py --standalone=1|-m pkg --log=x|train.py a --he
--standalone --no-python sh x --${local_rank}|train.py ${local_rank} $RANK ${rank}
"""
LAUNCH = """
train.py a|--use-env train.py a|--use_env train.py|--use train.py|--u train.py|--us train.py
--use_ train.py|--use-env=1 train.py|--no-python sh|--no-python --use-env sh|-m pkg a
--use-env -m pkg
--run-path train.py a|--nproc_per_node=2 train.py --local|--use-env|train.py --use-env|-- train.py x
--run-path --no-python train.py|--standalone --use_env --nproc-per-node 2 train.py
"""
VARIABLES = {
    "PET_STANDALONE": ("1", "0", "2", "-1", "true", "yes", "garbage", ""),
    "PET_MODULE": ("1", "0", "x"),
    "PET_NO_PYTHON": ("1", "0"),
    "PET_RUN_PATH": ("1", "00"),
    "PET_VIRTUAL_LOCAL_RANK": ("0", "no"),
    "PET_NNODES": ("1:2:3", "0", ""),
    "PET_MAX_RESTARTS": ("-1", "x", "1.5", ""),
    "PET_START_METHOD": ("thread", ""),
    "PET_SHUTDOWN_TIMEOUT": ("2.5", "x", ""),
    "PET_MONITOR_INTERVAL": ("x", "1"),
    "PET_NODE_RANK": ("x",),
    "PET_MASTER_PORT": ("x", "7"),
    "PET_LOG_DIR": ("",),
    "PET_NUMA_BINDING": ("node",),
    "PET_LOGS_SPECS": ("default",),
    "PET_NO_SUCH": ("1",),
    "PET_R": ("3",),
}


def cases():
    """Return every case, in a fixed order."""
    made = [*_each_option(), *_abbreviations(), *_mixtures(), *_soup()]
    found = [("run", argv, {}) for argv in made]
    found += [("run", argv, {}) for argv in _by_hand(BY_HAND)]
    found += [("launch", argv, {}) for argv in _by_hand(LAUNCH)]
    return found + list(_variables())


def _by_hand(text):
    for line in text.strip("\n").replace("\n", "|").split("|"):
        yield [word.replace("''", "").replace("~", " ") for word in line.split()]


def _spellings(name):
    return list(dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}")))


def _each_option():
    for name in FLAGS:
        for spelling in [*_spellings(name), *([f"-{SHORT[name]}"] if name in SHORT else [])]:
            yield from ([spelling, SCRIPT], [spelling], [f"{spelling}=1", SCRIPT])
    for name, values in VALUES.items():
        for spelling in _spellings(name):
            for value in values:
                yield from (
                    [spelling, value, SCRIPT, spelling, "x"],
                    [f"{spelling}={value}", SCRIPT],
                )
            yield from ([spelling], [spelling, SCRIPT], [spelling, "--", SCRIPT], [f"{spelling}="])
            yield from ([spelling, value, SCRIPT] for value in ("", "-5", "--standalone", "-z"))
        if name in SHORT:
            yield from ([f"-{SHORT[name]}", v, SCRIPT] for v in values)
            yield from ([f"-{SHORT[name]}{v}", SCRIPT] for v in values)
    yield []


def _abbreviations():
    for name in (*FLAGS, *VALUES):
        for spelling in _spellings(name):
            for end in range(3, len(spelling)):
                value = () if name in FLAGS else (VALUES[name][0],)
                yield [spelling[:end], *value, SCRIPT]


def _mixtures():
    dice = random.Random(20)
    names = list(VALUES)
    for _ in range(250):
        argv = []
        for name in dice.sample(names, dice.randint(1, 5)):
            spelling, value = dice.choice(_spellings(name)), dice.choice(VALUES[name])
            argv += [f"{spelling}={value}"] if dice.random() < 0.5 else [spelling, value]
            if dice.random() < 0.15:
                argv.append(f"--{dice.choice(FLAGS)}")
        argv += ["--"] if dice.random() < 0.1 else []
        yield [*argv, SCRIPT, *dice.sample(["--lr", "-m", "--", "0.1", "--nnodes=9"], 2)]


def _soup():
    """Return a command line of random words in random order."""
    dice = random.Random(21)
    short = ["-m", "-r", "-t", "-r3", "-t1", "-mt2", "-mr", "-r=1", "-1", "-2.5", "-x", "-"]
    odd = ["--", "", "x y", "-x y", "--x y", "1", "a=b", "0:1", "train.py", "--lr", "--nnodes=2"]
    for _ in range(600):
        spelled = [dice.choice(_spellings(dice.choice((*FLAGS, *VALUES)))) for _ in range(3)]
        cut = [name[: dice.randint(4, len(name))] for name in spelled]
        # Without --, which some versions of argparse drop as a value.
        glued = [f"{name}={dice.choice(odd[1:])}" for name in spelled[:1]]
        pool = [*spelled, *cut, *glued, *dice.sample(short, 4), *dice.sample(odd, 5)]
        yield dice.sample(pool, dice.randint(1, 6))


def _variables():
    for name, values in VALUES.items():
        for value in values:
            variable = f"PET_{name.replace('-', '_').upper()}"
            yield "run", [SCRIPT], {variable: value}
            yield "run", [f"--{name}", values[0], SCRIPT], {variable: value}
    for variable, values in VARIABLES.items():
        for value in values:
            yield "run", [SCRIPT], {variable: value}
    yield "run", ["--standalone", SCRIPT], {"PET_STANDALONE": "garbage"}
    yield "run", ["--standalone", SCRIPT], {"PET_STANDALONE": "0"}
    yield "run", ["--max-restarts", "1", SCRIPT], {"PET_MAX_RESTARTS": "garbage"}
    yield "run", [SCRIPT], {"PET_MODULE": "1", "PET_NO_PYTHON": "1"}
    yield "run", [SCRIPT], {"PYTHON_EXEC": "/usr/bin/other"}
    yield "launch", [SCRIPT], {"PET_NO_PYTHON": "1"}
    yield "launch", [SCRIPT], {"PET_USE_ENV": "1"}
