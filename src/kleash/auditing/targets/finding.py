"""From what was typed to what is audited."""

from collections.abc import Sequence

from kleash.auditing.targets.case import Case
from kleash.auditing.targets.dotted import arguments_of, function_at
from kleash.auditing.targets.peers import TARGETS
from kleash.errors import OptionError, UnknownNameError


def cases_of(target: str, arguments: Sequence[str] = ()) -> tuple[Case, ...]:
    """What ``target`` names, imported and ready to be audited.

    | typed | means |
    | ``verl`` | every case of that name in ``TARGETS`` |
    | ``verl:low_var_kl`` | one of them |
    | ``package.module:function`` | that function, also of a file in the current folder |

    Args:
        target: one of these.
        arguments: ``name=value`` for each keyword argument to bind: Python literals, or else strings.

    Raises:
        UnknownNameError: if nothing is called that.
        OptionError: if ``target`` or an argument is not written so, or the function does not take it.
        MissingExtraError: if the package, or something that it imports, is not installed.
        CannotRunError: if importing it raises.
    """
    name, colon, rest = target.partition(":")
    known = {case.name: case for case in TARGETS[name].cases} if name in TARGETS else {}
    if name in TARGETS and (not colon or rest in known):
        if arguments and not colon:
            raise OptionError(
                f"arguments go to one function; name one of {name}'s cases, {name}:{next(iter(known))}"
            )
        loaded = [case for case in TARGETS[name].load() if not colon or case.name == rest]
        return tuple(case.bound_to(arguments_of(case.function, arguments)) for case in loaded)
    if not colon:
        raise UnknownNameError(
            f"no target is called {target!r}; there are {', '.join(TARGETS)}, or package.module:function"
        )
    function = function_at(target)
    bound = arguments_of(function, arguments)
    return (
        Case(
            name=target, function=function, arguments=bound, audits=target, packages=(name.partition(".")[0],)
        ),
    )
