"""Who reads a configuration key: found in the source by following annotated names, without importing anything.

A read is an attribute access whose receiver is known to be a section of the schema: a parameter or dataclass field
annotated with it, a name assigned from such an expression, an element of such a list. ``engine.dtype`` counts for
``EngineConfig.dtype`` only where ``engine`` is known to be an ``EngineConfig``; an untyped receiver counts for nothing.
So a field without a reader is really unread or read through code without annotations, and both want mending.
``section.model_dump()`` hands a small section on as a whole and reads all its fields; dumping a section of sections
does not count, since that is how configurations are logged.

A type is a set of class names; a container has the types of what it holds (``list[A | B]`` is ``{A, B}``), which is
enough, since sections share no attribute with lists and dictionaries.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megarl.config.fields import submodels
from megarl.config.schema.base import StrictModel

Types = frozenset[str]
_NOTHING: Types = frozenset()
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True, slots=True, order=True)
class Read:
    """One place that reads a field."""

    path: str
    line: int
    as_whole: bool = False

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" + (" (with its section as a whole)" if self.as_whole else "")


@dataclass(slots=True)
class _Classes:
    """Attribute types and method return types of every class, and return types of functions, by name."""

    attributes: dict[str, dict[str, Types]] = field(default_factory=lambda: defaultdict(dict))
    functions: dict[str, Types] = field(default_factory=dict)
    properties: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    dumps: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    def attribute(self, owner: Types, name: str) -> Types:
        found = [self.attributes[cls].get(name, _NOTHING) for cls in owner if cls in self.attributes]
        return frozenset().union(*found)


def find_reads(roots: Iterable[type[StrictModel]], package: Path, *, exclude: str) -> dict[tuple[str, str], list[Read]]:
    """Reads of each field, keyed by the names of the section's class and the field.

    Args:
        roots: root configurations; everything below them is searched for.
        package: directory whose Python files are read.
        exclude: subdirectory that does not count, the configuration package itself.
    """
    classes = _Classes()
    sections: set[str] = set()
    for model in _all_models(roots):
        sections.add(model.__name__)
        classes.dumps[model.__name__] = _dumped(model)
        for name, info in model.model_fields.items():
            classes.attributes[model.__name__][name] = frozenset(m.__name__ for m in submodels(info.annotation))
        classes.properties.update(_properties(model))
    files = [p for p in sorted(package.rglob("*.py")) if exclude not in p.relative_to(package).parts[:1]]
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}
    for _ in range(3):  # what a class holds may depend on a class found later
        for tree in trees.values():
            _collect_declarations(tree, classes)
    reads: dict[tuple[str, str], set[Read]] = defaultdict(set)
    for path, tree in trees.items():
        shown = str(path.relative_to(package.parent))
        for owner, name, line in _Reader(classes).module(tree):
            for cls in owner & sections:
                for fieldname in classes.properties.get((cls, name), {name}):
                    reads[cls, fieldname].add(Read(shown, line))
                for key in classes.dumps[cls] if name == "model_dump" else ():
                    reads[key].add(Read(shown, line, as_whole=True))
    return {key: sorted(places) for key, places in reads.items()}


def _all_models(roots: Iterable[type[StrictModel]]) -> list[type[StrictModel]]:
    found: dict[type[StrictModel], None] = {}
    stack = list(roots)
    while stack:
        model = stack.pop()
        if model not in found:
            found[model] = None
            stack += [m for info in model.model_fields.values() for m in submodels(info.annotation)]
    return list(found)


def _dumped(model: type[StrictModel]) -> list[tuple[str, str]]:
    """Fields read by dumping a section: its own and those of small sections in it; none for a section of sections."""
    inner = [m for info in model.model_fields.values() for m in submodels(info.annotation)]
    if any(submodels(info.annotation) for m in inner for info in m.model_fields.values()):
        return []
    return [(m.__name__, name) for m in (model, *inner) for name in m.model_fields]


def _properties(model: type[StrictModel]) -> Iterator[tuple[tuple[str, str], set[str]]]:
    """Properties of a section and the fields they read: ``layout.world_size`` reads tp, pp and dp."""
    for name, value in vars(model).items():
        if isinstance(value, property) and value.fget is not None:
            tree = ast.parse(textwrap.dedent(inspect.getsource(value.fget)))
            names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
            yield (model.__name__, name), names & set(model.model_fields)


def _annotation(node: ast.expr | None) -> Types:
    """Every name in an annotation, those inside quotes too."""
    if node is None:
        return _NOTHING
    names: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            names.add(part.id)
        elif isinstance(part, ast.Attribute):
            names.add(part.attr)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            try:
                names |= _annotation(ast.parse(part.value, mode="eval").body)
            except SyntaxError:
                continue
    return frozenset(names)


def _collect_declarations(tree: ast.Module, classes: _Classes) -> None:
    """Annotated attributes of classes, what ``__init__`` stores, and return types."""
    for node in ast.walk(tree):
        if isinstance(node, _Function) and node.returns is not None:
            classes.functions[node.name] = _annotation(node.returns)
        if not isinstance(node, ast.ClassDef):
            continue
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                classes.attributes[node.name][item.target.id] = _annotation(item.annotation)
            elif isinstance(item, _Function):
                if any(isinstance(d, ast.Name) and "property" in d.id for d in item.decorator_list):
                    classes.attributes[node.name][item.name] = _annotation(item.returns)
                _collect_self(item, node.name, classes)


def _collect_self(method: _Function, owner: str, classes: _Classes) -> None:
    reader = _Reader(classes)
    names = reader.parameters(method, {"self": frozenset({owner})})
    for node in ast.walk(method):
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        types = reader.infer(node.value, names) if node.value is not None else _NOTHING
        if isinstance(node, ast.AnnAssign):
            types |= _annotation(node.annotation)
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                known = classes.attributes[owner].get(target.attr, _NOTHING)
                classes.attributes[owner][target.attr] = known | types


class _Reader:
    """Walks code with the types of the names in scope and reports attribute reads on typed receivers."""

    def __init__(self, classes: _Classes) -> None:
        self._classes = classes

    def module(self, tree: ast.Module) -> Iterator[tuple[Types, str, int]]:
        yield from self._block(tree, {}, None)

    def _block(self, scope: ast.AST, outer: Mapping[str, Types], owner: str | None) -> Iterator[tuple[Types, str, int]]:
        names = dict(outer)
        if isinstance(scope, _SCOPES):
            names = self.parameters(scope, {**outer, "self": frozenset({owner} if owner else ())})
        inner: list[ast.AST] = []
        nodes = list(_own_nodes(scope, inner))
        for _ in range(2):  # a loop may use a name above its assignment
            for node in nodes:
                self._bind(node, names)
        for node in nodes:
            yield from self._reads(node, names)
        for child in inner:
            yield from self._block(child, names, child.name if isinstance(child, ast.ClassDef) else owner)

    def parameters(self, function: _Function | ast.Lambda, outer: Mapping[str, Types]) -> dict[str, Types]:
        """Names in scope at the top of a function."""
        arguments = function.args
        typed = {
            argument.arg: _annotation(argument.annotation)
            for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
            if argument.arg != "self"
        }
        return {**outer, **typed}

    def infer(self, node: ast.expr, names: Mapping[str, Types]) -> Types:
        """Types an expression may have."""
        match node:
            case ast.Name(id=name):
                return names.get(name, _NOTHING)
            case ast.Attribute(value=value, attr=attr):
                owner = self.infer(value, names)
                # Loaded[TrainConfig].config: the type argument stands beside the generic in the set of names.
                return owner if "Loaded" in owner and attr == "config" else self._classes.attribute(owner, attr)
            case ast.Subscript(value=value) | ast.Await(value=value) | ast.NamedExpr(value=value):
                return self.infer(value, names)
            case ast.IfExp(body=one, orelse=other):
                return self.infer(one, names) | self.infer(other, names)
            case ast.BoolOp(values=parts) | ast.Tuple(elts=parts) | ast.List(elts=parts):
                return frozenset().union(*(self.infer(part, names) for part in parts))
            case ast.Dict(values=parts):
                return frozenset().union(*(self.infer(part, names) for part in parts))
            case ast.Call(func=ast.Name(id=name), args=args):
                if name in ("enumerate", "zip", "sorted", "list", "tuple", "reversed"):
                    return frozenset().union(*(self.infer(argument, names) for argument in args))
                if name in self._classes.attributes:
                    return frozenset({name})
                return self._classes.functions.get(name, _NOTHING)
            case ast.Call(func=ast.Attribute(value=value, attr=attr)):
                if attr in ("items", "values", "get", "pop"):
                    return self.infer(value, names)
                return self._classes.functions.get(attr, _NOTHING)
        return _NOTHING

    def _bind(self, node: ast.AST, names: dict[str, Types]) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                pairs = [(target, value) for target in targets]
            case ast.NamedExpr(target=target, value=value):
                pairs = [(target, value)]
            case ast.For(target=target, iter=value) | ast.AsyncFor(target=target, iter=value):
                pairs = [(target, value)]
            case ast.comprehension(target=target, iter=value):
                pairs = [(target, value)]
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                names[name] = _annotation(annotation)
                return
            case _:
                return
        for target, value in pairs:
            types = self.infer(value, names)
            for part in ast.walk(target):
                if isinstance(part, ast.Name) and types:
                    names[part.id] = names.get(part.id, _NOTHING) | types

    def _reads(self, node: ast.AST, names: Mapping[str, Types]) -> Iterator[tuple[Types, str, int]]:
        match node:
            case ast.Attribute(value=value, attr=attr, ctx=ast.Load(), lineno=line):
                yield self.infer(value, names), attr, line
            case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(attr)), *_], lineno=line):
                yield self.infer(value, names), attr, line


def _own_nodes(scope: ast.AST, inner: list[ast.AST]) -> Iterator[ast.AST]:
    """Nodes of a scope, not those of functions and classes inside it, which are collected in ``inner``."""
    children = list(ast.iter_child_nodes(scope))
    for child in children:
        if isinstance(child, (*_SCOPES, ast.ClassDef)):
            inner.append(child)
        else:
            yield child
            yield from _own_nodes(child, inner)
