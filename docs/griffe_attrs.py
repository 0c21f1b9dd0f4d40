"""Lets the reference see the parameters of attrs classes, which are their fields."""

import griffe


class Attrs(griffe.Extension):
    """Gives each attrs class the ``__init__`` that attrs makes at run time."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: object) -> None:
        """When all of a package is known, so that its classes' bases are too."""
        for member in list(pkg.members.values()):
            if member.is_alias:
                continue
            if isinstance(member, griffe.Module):
                self.on_package(pkg=member)
            elif isinstance(member, griffe.Class):
                _add_init(member)


def _add_init(cls: griffe.Class) -> None:
    made_by = [d for d in cls.decorators if d.callable_path.startswith("attrs.")]
    if not made_by or "__init__" in cls.members:
        return
    kw_only = any("kw_only=True" in str(decorator.value) for decorator in made_by)
    parameters: dict[str, griffe.Parameter] = {}
    for each in [*reversed(cls.mro()), cls]:
        for name, attribute in each.members.items():
            if isinstance(attribute, griffe.Attribute) and _is_field(attribute):
                parameters[name] = _parameter(name, attribute, kw_only)
    init = griffe.Function(
        "__init__",
        parameters=griffe.Parameters(
            griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword),
            *parameters.values(),
        ),
        returns="None",
    )
    cls.set_member("__init__", init)


def _is_field(attribute: griffe.Attribute) -> bool:
    annotation, value = str(attribute.annotation or ""), str(attribute.value or "")
    if not annotation or "ClassVar" in annotation or "property" in attribute.labels:
        return False
    return not attribute.name.startswith("_") and "init=False" not in value


def _parameter(name: str, field: griffe.Attribute, kw_only: bool) -> griffe.Parameter:
    default = field.value
    if isinstance(default, griffe.ExprCall):  # attrs.field(default=…)
        keywords = [arg for arg in default.arguments if isinstance(arg, griffe.ExprKeyword)]
        default = next((arg.value for arg in keywords if arg.name == "default"), None)
    kinds = griffe.ParameterKind
    return griffe.Parameter(
        name,
        annotation=field.annotation,
        kind=kinds.keyword_only if kw_only else kinds.positional_or_keyword,
        default=default,
    )
