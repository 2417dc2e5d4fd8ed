"""Which contexts a client has made and must release, and in which order.

It knows ids and no call. One tree per client: its root stands for the client itself, below it
hang created contexts, below those their branches.
"""


class Lineage:
    """One context made through a client, and the contexts forked from it through that client.

    A context is owned until it is released or detached. What is owned below a detached or
    released context stays owned, by the nearest owner above. Invariants: a node hangs below its
    parent while it is owned or anything owned hangs below it; children are in order of making.
    """

    def __init__(self, id: str, parent: "Lineage | None" = None, *, is_owned: bool = True) -> None:
        self.id = id
        self.is_owned = is_owned
        self.is_released = False
        self._parent = parent
        # By node, not by id: an attached handle has a node of its own for a context made here.
        self._children: dict[Lineage, None] = {}
        if is_owned:
            self._hang()

    def adopt(self, id: str, *, is_owned: bool = True) -> "Lineage":
        """Adds a context that was made from this one."""
        return Lineage(id, self, is_owned=is_owned)

    def own(self) -> None:
        """Makes leaving a `with` above release this context, unless it is released already."""
        if not self.is_released:
            self.is_owned = True
            self._hang()

    def disown(self) -> None:
        """Makes leaving a `with` above leave this context alone; disowning twice is fine."""
        self.is_owned = False
        node = self
        while node._parent is not None and not node.is_owned and not node._children:
            node._parent._children.pop(node, None)
            node = node._parent

    def release(self) -> None:
        """Notes that the context is gone; releasing twice is fine."""
        self.is_released = True
        self.disown()

    def owned(self) -> list["Lineage"]:
        """Lists what is owned here and below, newest first, branches before what they came from."""
        found: list[Lineage] = []
        stack = [self]
        while stack:
            node = stack.pop()
            if node.is_owned:
                found.append(node)
            stack.extend(reversed(node._children))
        return found[::-1]

    def _hang(self) -> None:
        node = self
        while node._parent is not None and node not in node._parent._children:
            node._parent._children[node] = None
            node = node._parent
