"""Functions and classes of a ``__main__`` that cannot be imported: there, and back as what they were.

Each text is a main program (see `tests.support.by_value_there`): ``there(function, *args)`` makes the call in another
interpreter. ``BY_VALUE=cloudpickle`` in the environment shows which of them cloudpickle fails by itself.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.by_value_there import passes

pytestmark = [pytest.mark.each_python, pytest.mark.slow]

SYNTAX_OF_3_12 = pytest.mark.skipif(sys.version_info < (3, 12), reason="the syntax is Python 3.12's")


PROGRAMS = {
    "what the launcher sent comes back as the launchers own": """
        import copyreg
        class Node:
            def me(self): return Node
            @classmethod
            def kind(cls): return cls
        class Sub(Node): pass
        class Boom(Exception): pass
        Node.first, Node.itself = Node(), Node
        def helper(): return 1
        closure = (lambda value: lambda: value)(Sub)
        def check(node):
            assert Node.itself is Node and node.me() is Node and type(Node.first) is Node
            node.x = 5
            return node, Sub, Boom("x"), helper, closure, Node.me, node.kind, [Node, (Sub, {Node: helper})]
        node, sub, boom, function, inner, method, kind, nest = there(check, Node())
        assert type(node) is Node and node.x == 5
        assert sub is Sub and type(boom) is Boom and function is helper and inner is closure and method is Node.me
        assert kind.__self__ is Node and nest == [Node, (Sub, {Node: helper})]
        """,
    "what the worker made itself comes back by value": """
        class Node: pass
        def helper(): return 1
        def check():
            import dataclasses, enum, functools, typing
            class Own(Node):
                def f(self): return helper, __class__
            class Color(enum.Enum): RED = 1
            @dataclasses.dataclass(slots=True)
            class Point:
                x: int
            T = typing.TypeVar("T")
            class Box(typing.Generic[T]):
                def __init__(self, v): self.v = v
            @functools.cache
            def count(n): return count(n - 1) + 1 if n else 0
            class Base:
                known = {}
                def __init_subclass__(cls, *, key): Base.known[key] = cls
            class K(Base, key="k"): pass
            return Own(), Color.RED, Color, Point(1), Box(Color.RED), count, K()
        own, red, Color, point, box, count, k = there(check)
        assert isinstance(own, Node) and own.f() == (helper, type(own))
        assert red is Color.RED is Color(1) is box.v and point.x == 1 and count(5) == 5
        assert type(k).known == {"k": type(k)}
        """,
    "a reference means nothing to another unpickler": """
        import io, pickle
        from phalanx._engine.pickling import by_value, picklers
        from tests.support.by_value_there import never
        picklers.received.note(there, 3)
        file = io.BytesIO()
        picklers.plain(file, {}, importable=never).dump([there])
        try: pickle.loads(file.getvalue())
        except pickle.UnpicklingError as error: assert "object 3 is the launcher's" in str(error)
        else: raise AssertionError
        """,
    "by reference stops at what the other side cannot import": """
        import functools, io
        from phalanx._engine.pickling import by_value, picklers
        from tests.support.by_value_there import never
        class Mark:
            def __reduce__(self): return "MARK"
        MARK = Mark()
        @functools.cache
        def cached(): pass
        def plainly(): pass
        for value in (Mark, MARK, cached, plainly):
            try: picklers.plain(io.BytesIO(), {}, importable=never).dump([1, value])
            except picklers.NotByName: pass
            else: raise AssertionError(value)
            picklers.plain(io.BytesIO(), {}, importable=lambda _: True).dump(value)
        """,
    "cached functions": """
        import functools
        @functools.lru_cache(maxsize=7, typed=True)
        def fib(n):
            "Fibonacci."
            return n if n < 2 else fib(n - 1) + fib(n - 2)
        fib.note = 1
        fib(3)
        def check():
            assert fib.cache_info() == (0, 0, 7, 0) and fib(30) == 832040
            assert fib.cache_parameters() == {"maxsize": 7, "typed": True}
            assert (fib.__name__, fib.__doc__, fib.__module__, fib.note) == ("fib", "Fibonacci.", "__main__", 1)
            assert fib.__wrapped__.__globals__["fib"] is fib
            return fib
        assert there(check) is fib
        """,
    "functions share their globals and names of modules": """
        import json as j, logging, os.path, types
        log, counter = logging.getLogger("x"), 0
        made = types.ModuleType("made")
        exec("def f(): return g()\\ndef g(): return 3", vars(made))
        def increase():
            global counter
            counter += 1
        class A:
            def get(self):
                increase()
                return counter
        def check():
            increase()
            log.debug("x")
            return A().get(), counter, os.path.join("a", "b"), j.dumps([1]), made.f(), __name__
        assert there(check) == (2, 2, "a/b", "[1]", 3, "__main__") and counter == 0
        """,
    "private methods by reference": """
        import io, multiprocessing.reduction, pickle
        from phalanx._engine.pickling import by_value, picklers
        table = dict(multiprocessing.reduction.ForkingPickler._extra_reducers)
        class A:
            def __work(self): return 3
            def bound(self): return self.__work
            @classmethod
            def __make(cls): return cls
            def make(self): return self.__make
            @classmethod
            def plain(cls): return cls
        class B(A):
            def __work(self): return 4
        for method in (A().bound(), B().bound(), A().make(), B().make(), A.plain, B.plain, A().plain):
            file = io.BytesIO()
            picklers.plain(file, table, importable=importable_by_name).dump(method)
            assert pickle.loads(file.getvalue())() == method(), method
            assert picklers.reduce_method(method)[0] is getattr
        assert picklers.reduce_method(A().bound())[1][1] == "_A__work"
        """,
    "a method that its object lost goes in two parts": """
        import types
        from phalanx._engine.pickling import by_value, picklers
        class A:
            def f(self): return "A"
            @property
            def broken(self): raise ValueError
        class B(A):
            def f(self): return "B"
            def over(self): return super().f
        b = B()
        assert picklers.reduce_method(b.over()) == (types.MethodType, (A.f, b))
        def broken(self): return 5
        assert picklers.reduce_method(types.MethodType(broken, b)) == (types.MethodType, (broken, b))
        assert there(b.over()) == "A" and there(types.MethodType(broken, b)) == 5
        """,
    "types of typing": """
        import typing as t
        UserId = t.NewType("UserId", int)
        T = t.TypeVar("T", bound=int, covariant=True)
        C = t.TypeVar("C", int, str)
        P = t.ParamSpec("P")
        Ts = t.TypeVarTuple("Ts")
        class Call(t.Generic[P, T]): pass
        class Many(t.Generic[*Ts]): pass
        everything = (UserId, T, C, P, Ts, Call, Many)
        def check():
            assert UserId(3) == 3 and UserId.__supertype__ is int
            assert T.__bound__ is int and T.__covariant__ and C.__constraints__ == (int, str)
            assert {kind.__module__ for kind in (UserId, T, P, Ts)} == {"__main__"}
            assert [kind.__name__ for kind in everything] == ["UserId", "T", "C", "P", "Ts", "Call", "Many"]
            assert Many[int, str].__args__ == (int, str) and Call.__parameters__ == (P, T) and Call[[int], str]
            return everything, list[T], Call[P, int], t.Optional[UserId]
        back, *forms = there(check)
        assert all(a is b for a, b in zip(back, everything, strict=True))
        assert forms == [list[T], Call[P, int], t.Optional[UserId]]
        """,
    "named tuples and typed dicts": """
        import collections, typing as t
        class Point(t.NamedTuple):
            x: int
            y: int = 2
        Pair = collections.namedtuple("Pair", "a b", defaults=[3])
        class Movie(t.TypedDict, total=False):
            title: str
            year: t.Required[int]
        class More(Movie):
            more: int
        def check():
            assert Point(1)._replace(y=3) == (1, 3) and Point._field_defaults == {"y": 2} and Pair(1).b == 3
            assert Movie(title="x", year=1) == {"title": "x", "year": 1}
            assert t.is_typeddict(Movie) and Movie.__total__ is False and Movie.__required_keys__ == {"year"}
            assert More.__required_keys__ == {"year", "more"} and More.__optional_keys__ == {"title"}
            return Point(1), Pair(1), Movie, More
        point, pair, *kinds = there(check)
        assert type(point) is Point and type(pair) is Pair and kinds == [Movie, More]
        """,
    "protocols and generic classes": """
        import collections.abc, typing as t
        T, K = t.TypeVar("T"), t.TypeVar("K")
        U = t.TypeVar("U", bound="Node")
        @t.runtime_checkable
        class HasF(t.Protocol[K]):
            def f(self) -> K: ...
        class Impl:
            def f(self): return 1
        class Explicit(HasF[int]):
            def f(self): return 3
        class Box(t.Generic[T]):
            def __init__(self, v: T): self.v = v
            def get(self) -> T: return self.v
            def other(self): return IntBox(self.v)
        class Ints(Box[int]): pass
        class Registry(dict[K, T]): pass
        class Old(t.Dict[K, T]): pass
        class Seq(collections.abc.Sequence[T]):
            def __len__(self): return 0
            def __getitem__(self, i): raise IndexError
        class Node(t.Generic[U]): pass
        IntBox, Maybe, Box.nested = Box[int], t.Optional[Box[T]], Box[Box[T]]  # the class refers to forms of itself
        def check():
            assert isinstance(Impl(), HasF) and not isinstance(3, HasF) and isinstance(Explicit(), HasF)
            try: HasF()
            except TypeError: pass
            else: raise AssertionError
            assert Box[int](3).get() == 3 and t.get_type_hints(Box.get) == {"return": T}
            assert Box.__parameters__ == (T,) and Ints.__orig_bases__ == (Box[int],) and Ints(3).other().v == 3
            assert Box.nested[int].__args__ == (Box[int],) and Maybe[int] == t.Optional[Box[int]]
            assert Registry[str, int](a=1) == {"a": 1} and Old(a=1)["a"] == 1 and len(Seq()) == 0
            return (Impl(), Box(1), Ints(1), Registry(a=1), Old(), Seq(), Node()), (IntBox, Maybe, Box.nested), (
                lambda: IntBox)
        objects, forms, made = there(check)
        assert [type(each) for each in objects] == [Impl, Box, Ints, Registry, Old, Seq, Node]
        assert forms == (IntBox, Maybe, Box.nested) and made().__origin__ is Box
        """,
    "enumerations": """
        import enum
        class Color(enum.Enum):
            RED = 1
            GREEN = 2
            CRIMSON = 1
            @property
            def nice(self): return self.name.title()
            @classmethod
            def best(cls): return cls.GREEN
        class Auto(enum.Enum):
            def _generate_next_value_(name, start, count, last): return name.lower()
            @classmethod
            def _missing_(cls, value): return cls.ONE
            ONE = enum.auto()
        class Mixed(enum.Enum):
            A = {"x": 1}
            B = enum.member(len)
            C = enum.nonmember(4)
        Number, Text = enum.IntEnum("Number", "ONE TWO"), enum.StrEnum("Text", {"X": "x"})
        def check(red):
            assert red is Color.RED is Color(1) is Color["RED"] is Color.CRIMSON is Color["CRIMSON"]
            assert list(Color) == [Color.RED, Color.GREEN] and list(Color.__members__) == ["RED", "GREEN", "CRIMSON"]
            assert red.nice == "Red" and Color.best() is Color.GREEN and repr(red) == "<Color.RED: 1>"
            assert Auto.ONE.value == "one" and Auto("zz") is Auto.ONE and {Auto.ONE: 1}[Auto.ONE] == 1
            assert Mixed.A.value == {"x": 1} and Mixed.B.value is len and Mixed.C == 4
            assert Number.ONE + 1 == Number.TWO and Text.X == "x" and Number(2) is Number.TWO
            try: Color.RED = 3
            except AttributeError: pass
            else: raise AssertionError
            return Color.RED, Color.CRIMSON, Auto.ONE, Mixed.B, Number.TWO, Text.X
        back = there(check, Color.RED)
        mine = (Color.RED, Color.CRIMSON, Auto.ONE, Mixed.B, Number.TWO, Text.X)
        assert all(a is b for a, b in zip(back, mine, strict=True)), back
        """,
    "enumerations whose members are made by the class": """
        import enum
        class Planet(enum.Enum):
            EARTH = (1.0, 2.0)
            def __init__(self, mass, radius): self.mass, self.radius = mass, radius
            @property
            def density(self): return self.mass / self.radius
        class Coordinate(bytes, enum.Enum):
            PX = (0, "P.X")
            PY = (1, "P.Y")
            def __new__(cls, value, label):
                made = bytes.__new__(cls, [value])
                made._value_, made.label = value, label
                return made
        def check():
            assert Planet.EARTH.density == 0.5 and Planet((1.0, 2.0)) is Planet.EARTH
            assert Coordinate.PY.label == "P.Y" and Coordinate.PY == b"\\x01" and Coordinate(1) is Coordinate.PY
            return Planet.EARTH, Coordinate.PY
        assert [a is b for a, b in zip(there(check), (Planet.EARTH, Coordinate.PY), strict=True)] == [True, True]
        """,
    "a file is not copied": """
        import os, sys, tempfile
        def check(): return sys.stdout is not None
        assert there(lambda: sys.stdout is not None)
        with tempfile.TemporaryFile("w+") as file:
            try: there(lambda: file.read())
            except TypeError as error: assert "cannot pickle 'TextIOWrapper' object" in str(error), error
            else: raise AssertionError
        """,
    "flags": """
        import enum
        class Perm(enum.Flag):
            R = enum.auto()
            W = enum.auto()
            X = enum.auto()
            RW = R | W
        class Bits(enum.IntFlag, boundary=enum.KEEP):
            A = 1
        both = Perm.R | Perm.X  # it has no name
        def check():
            assert Perm.R | Perm.W is Perm.RW is Perm(3) and list(Perm.RW) == [Perm.R, Perm.W]
            assert ~Perm.RW is Perm.X and Perm.R | Perm.X is both and Bits(9).value == 9
            return both, Perm.RW, Perm.W | Perm.X, Perm(0), lambda: Perm.W | Perm.X
        back = there(check)
        assert all(a is b for a, b in zip(back, (both, Perm.RW, Perm.W | Perm.X, Perm(0)))), back
        assert back[4]() is Perm.W | Perm.X
        """,
    "marks that are pickled by their name": """
        class Missing:
            def __init__(self): self.note = 3
            def __reduce__(self): return "MISSING"
        class Slotted:
            __slots__ = ("a",)
            def __reduce__(self): return "SLOTTED"
        class One:
            one = None
            def __new__(cls):
                assert cls.one is None
                cls.one = object.__new__(cls)
                return cls.one
            def __reduce__(self): return "ONE"
        MISSING, SLOTTED, ONE = Missing(), Slotted(), One()
        SLOTTED.a = 5
        def check(x, y=MISSING):
            assert x is MISSING is y and isinstance(x, Missing) and x.note == 3 and SLOTTED.a == 5 and One.one is ONE
            return MISSING, SLOTTED, ONE
        back = there(check, MISSING)
        assert all(a is b for a, b in zip(back, (MISSING, SLOTTED, ONE), strict=True))
        """,
    "data classes": """
        import dataclasses as d, typing
        @d.dataclass
        class P:
            x: int
            y: int = 2
            z: list = d.field(default_factory=list)
            w: typing.ClassVar[int] = 3
            i: d.InitVar[int] = 4
            def __post_init__(self, i): self.sum = self.x + i
        @d.dataclass(frozen=True, slots=True, kw_only=True, order=True)
        class F:
            a: int
            b: str = "b"
        @d.dataclass
        class K:
            a: int
            _: d.KW_ONLY
            b: int = 1
        def check(p):
            assert p == P(9) and [field.name for field in d.fields(P)] == ["x", "y", "z"]
            assert d.fields(P)[0].default is d.MISSING and P.__dataclass_fields__["w"]._field_type is d._FIELD_CLASSVAR
            assert P(1).z is not P(1).z and d.asdict(P(1)) == {"x": 1, "y": 2, "z": []}
            assert d.replace(p, x=5, i=2).sum == 7
            assert P.__dataclass_fields__["i"]._field_type is d._FIELD_INITVAR and K.__annotations__["_"] is d.KW_ONLY
            f = F(a=1)
            assert d.replace(f, b="c").b == "c" and f < F(a=2) and hash(f) == hash(F(a=1)) and K(1, b=3).b == 3
            assert not hasattr(f, "__dict__")
            for wrong, error in ((lambda: setattr(f, "a", 3), d.FrozenInstanceError), (lambda: F(1), TypeError)):
                try: wrong()
                except error: pass
                else: raise AssertionError
            return p, f, K(1)
        assert there(check, P(9)) == (P(9), F(a=1), K(1))
        """,
    "slots": """
        import weakref
        class Slots:
            __slots__ = ("a", "__b", "__weakref__")
            def __init__(self): self.a, self.__b = 1, 2
            def b(self): return self.__b
        class Sub(Slots):
            __slots__ = "c"
        class Both:
            __slots__ = {"a": "its doc", "__dict__": ""}
        def check(slots, sub):
            assert slots.a == 1 and slots.b() == 2 and sub.c == 3 and sub.b() == 2 and weakref.ref(slots)
            assert not hasattr(Sub(), "__dict__")
            both = Both()
            both.a, both.z = 1, 3
            return slots, sub, both
        sub = Sub()
        sub.c = 3
        slots, sub, both = there(check, Slots(), sub)
        assert type(slots) is Slots and slots.b() == 2 and type(sub) is Sub and sub.c == 3 and vars(both) == {"z": 3}
        """,
    "abstract classes and descriptors": """
        import abc, functools, operator
        class Shape(abc.ABC):
            @abc.abstractmethod
            def area(self): ...
            @property
            def p(self): return 1
            @p.setter
            def p(self, value): self._p = value
            q = property(operator.attrgetter("_p"), doc="Reads p.")
            part = functools.partialmethod(lambda self, x, y: (x, y), 1)
            @staticmethod
            def s(): return 2
            @classmethod
            def c(cls): return cls
        class Square(Shape):
            def area(self): return super().p + 1
            def own(self): return __class__
            class Inner:
                class Deep: pass
        Shape.register(int)
        class Named:
            def __set_name__(self, owner, name): self.name = name
            def __get__(self, obj, owner): return self.name
        class HasNamed:
            d = Named()
        def check():
            try: Shape()
            except TypeError: pass
            else: raise AssertionError
            square = Square()
            assert square.area() == 2 and square.own() is Square is square.c() and square.s() == 2
            assert isinstance(3, Shape) and not isinstance("", Shape) and square.part(2) == (1, 2)
            square.p = 4
            assert square.q == 4 and Shape.q.__doc__ == "Reads p."
            assert Square.Inner.Deep.__qualname__ == "Square.Inner.Deep" and HasNamed().d == "d"
            return square, Square.Inner.Deep()
        square, deep = there(check)
        assert type(square) is Square and type(deep) is Square.Inner.Deep
        """,
    "cached properties": """
        import functools
        class A:
            calls = 0
            @functools.cached_property
            def p(self):
                "Costly."
                self.calls += 1
                return 5
        def check(a):
            assert (a.p, a.p, a.calls) == (5, 5, 1) and A.p.__doc__ == "Costly."
            return a
        assert there(check, A()).p == 5
        """,
    "a class is not announced again to its base": """
        class Base:
            known = {}
            def __init_subclass__(cls, *, key, **options):
                super().__init_subclass__(**options)
                Base.known[key] = cls
        class One(Base, key="one"): pass
        class Two(One, key="two"): pass
        def check(one):
            assert Base.known == {"one": One, "two": Two} and one is One
            class New(Base, key="new"): pass
            assert Base.known["new"] is New
            return New(), Two()
        new, two = there(check, One)
        assert isinstance(new, Base) and type(two) is Two and Base.known == {"one": One, "two": Two}
        """,
    "a class that comes back is announced to nobody here": """
        class Meta(type):
            made = []
            def __init__(cls, name, bases, names):
                super().__init__(name, bases, names)
                Meta.made.append((name, names["tag"]))
        class Base(metaclass=Meta):
            tag = 0
            known = {}
            def __init_subclass__(cls): Base.known[cls.tag] = cls
        def make():
            class Mine(Base): tag = 7
            return Mine()
        mine = there(make)
        assert mine.tag == 7 and isinstance(mine, Base) and Base.known == {} and Meta.made == [("Base", 0)], Meta.made
        """,
    "a class known to cloudpickle is not changed": """
        import cloudpickle
        class Config: limit = 1
        data = cloudpickle.dumps(Config())
        def check():
            config = cloudpickle.loads(data)
            type(config).limit = 99
            return config
        back = there(check)
        assert type(back) is Config and Config.limit == 1
        """,
    "metaclasses": """
        class Meta(type):
            known = {}
            def __new__(meta, name, bases, names, *, option=None):
                made = super().__new__(meta, name, bases, names | {"option": names["must"]})
                meta.known[name] = made
                return made
            def __init__(cls, name, bases, names, *, option=None): super().__init__(name, bases, names)
            def __call__(cls, *args): return super().__call__(*args)
            def __setattr__(cls, name, value): raise AttributeError(name)
            def __len__(cls): return 3
            @property
            def title(cls): return cls.__name__
        class A(metaclass=Meta, option=4):
            must = 1
            def __init__(self, y): self.y = y
        class B(A): must = 2
        def check():
            assert Meta.known == {"A": A, "B": B} and type(A) is Meta and (A.option, B.option) == (1, 2)
            assert A.title == "A" and A(3).y == 3 and len(B) == 3
            return B(4), B
        b, kind = there(check)
        assert type(b) is B is kind and b.y == 4
        """,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_by_value_it_is_there_and_back_what_it_was(name: str) -> None:
    passes(PROGRAMS[name])


def test_what_a_script_holds_goes_by_name_within_a_value(tmp_path: Path) -> None:
    passes(
        """
        import enum, functools, typing
        class Base:
            pass
        class Color(enum.Enum):
            RED = 1
        T = typing.TypeVar("T")
        class Mark:
            def __reduce__(self): return "MARK"
        MARK = Mark()
        @functools.cache
        def cached(): return 7
        def helper(): return __name__
        if __name__ == "__main__":
            def outer():
                class Local(Base):
                    color = Color.RED
                    def help(self): return helper(), cached(), MARK is self.mark
                    mark = MARK
                return lambda: (Local(), Local().help(), Base(), Color.RED, MARK, helper, cached)
            local, helped, base, red, mark, function, cache = there(outer(), importable=importable_by_name)
            assert isinstance(local, Base) and helped == ("__mp_main__", 7, True) and type(base) is Base
            assert red is Color.RED is local.color and mark is MARK and function is helper and cache is cached
        """,
        script=tmp_path / "script.py",
    )


def test_a_module_that_is_registered_goes_by_value(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import functools, typing\n"
        "T = typing.TypeVar('T')\n"
        "K = 3\n"
        "def f(x): return g(x) + K\n"
        "@functools.cache\n"
        "def g(x): return x\n"
        "class A(typing.Generic[T]):\n"
        "    def m(self): return f(1)\n"
        "class Mark:\n"
        "    def __reduce__(self): return 'MARK'\n"
        "MARK = Mark()\n",
        encoding="utf-8",
    )
    passes(f"""
        import sys
        from phalanx._engine.pickling import by_value, picklers
        assert not picklers.registered() and "cloudpickle" not in sys.modules
        sys.path.insert(0, {str(tmp_path)!r})
        import mine, cloudpickle
        assert not picklers.registered()
        cloudpickle.register_pickle_by_value(mine)
        assert picklers.registered()
        assert there(mine.f, 3) == 6
        f = mine.f
        def check(a, mark): return a.m(), a, f(2), mark
        four, a, five, mark = there(check, mine.A(), mine.MARK)
        assert (four, five) == (4, 5) and type(a) is mine.A and mark is mine.MARK
    """)


def test_the_import_loads_no_cloudpickle() -> None:
    code = (
        "import sys, phalanx._engine.pickling.by_value, phalanx._engine.pickling.picklers as m; "
        "print(bool(m.registered()), {'cloudpickle', 'typing'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "False set()\n"


@pytest.mark.long
def test_private_methods_go_by_value() -> None:
    passes("""
        import functools, multiprocessing.reduction
        class A:
            n = 4
            def __work(self): return "work", self.n
            def bound(self): return self.__work
            @classmethod
            def __make(cls): return cls
            def make(self): return self.__make
        class B(A):
            def over(self): return super().bound
            def bound(self): return 9
        a = A(); a.n = 7
        assert there(a.bound()) == ("work", 7) == there(functools.partial(a.bound())) and there(a.make()) is A
        assert there(B().over)()() == ("work", 4) == there(B().over())()
        a.me = a.bound()  # which refers to what refers to it
        def check(a): return a.me, a
        method, b = there(check, a)
        assert method.__self__ is b and method.__func__ is A._A__work and method() == ("work", 7)
    """)


@SYNTAX_OF_3_12
def test_type_parameters_and_aliases_in_the_syntax_of_3_12() -> None:
    passes("""
        class Box[T: int]:
            def __init__(self, v: T): self.v = v
            def get(self) -> T: return self.v
        class Node[T: Node]: pass
        def first[U: (int, str), *Ts, **P](x: U) -> U: return x
        type Pair[K] = tuple[K, K]
        type Number = int | float
        def check():
            (T,) = Box.__type_params__
            assert Box[int](3).get() == 3 and Box.__parameters__ == (T,) and T.__bound__ is int
            assert Box.get.__annotations__ == {"return": T} and Node.__type_params__[0].__bound__ is Node
            U, Ts, P = first.__type_params__
            assert first(1) == 1 and first.__annotations__["x"] is U
            assert U.__constraints__ == (int, str) and U.__infer_variance__
            assert Pair[int].__args__ == (int,) and Pair.__value__ == tuple[Pair.__type_params__ * 2]
            assert Number.__value__ == int | float
            return Box, T, Node, Pair, Number, U
        assert there(check) == (Box, *Box.__type_params__, Node, Pair, Number, first.__type_params__[0])
    """)


@pytest.mark.skipif(sys.version_info < (3, 14), reason="annotations are evaluated when they are asked for since 3.14")
def test_annotations_with_names_that_are_not_defined_go_as_texts() -> None:
    """As names have that are imported for type checkers alone: they go as texts, and the others as what they are."""
    passes("""
        import dataclasses
        class Known: pass
        def function(x: Unknown, y: Known, *z: list[Unknown]) -> int: return x
        class Class:
            x: Unknown
            y: Known
            def method(self, other: Class) -> Unknown: return other
        class Whole:
            x: Known
            y: Whole
        @dataclasses.dataclass
        class Data:
            x: Known
            y: "Unknown" = None
        def check():
            texts = {"x": "Unknown", "y": Known, "z": "list[Unknown]", "return": int}
            assert function(1, 2) == 1 and function.__annotations__ == texts
            assert Class.__annotations__ == {"x": "Unknown", "y": Known}
            assert Class.method.__annotations__ == {"other": Class, "return": "Unknown"}
            assert Whole.__annotations__ == {"x": Known, "y": Whole}
            assert dataclasses.make_dataclass("Sub", [("z", int, 3)], bases=(Data,))(1).z == 3
            return function, Class, Whole, Data
        function.own = 5
        assert there(check) == (function, Class, Whole, Data)
        try: function.__annotations__
        except NameError: pass
        else: raise AssertionError("the launcher's own is as it was")
    """)


@pytest.mark.parametrize(
    "statement,error",
    [
        ("class it(frozenset, enum.Enum): A = [1, 2]", "mixed with frozenset"),
        (
            "class Slot: __slots__ = ('w',)\nclass it(Slot, enum.Enum):\n A = 1\n def __init__(self, v): self.w = v",
            "mixed with Slot, which has slots",
        ),
        ("class Mark(int):\n    def __reduce__(self): return 'it'\nit = Mark(3)", "by its name"),
        ("it = functools.singledispatch(print)", "weakref"),
    ],
)
def test_what_cannot_be_made_again_is_refused(statement: str, error: str) -> None:
    passes(f"""
import enum, functools, pickle
{statement}
try: there(lambda: it)
except (pickle.PicklingError, TypeError) as error: assert {error!r} in str(error), error
else: raise AssertionError
    """)
