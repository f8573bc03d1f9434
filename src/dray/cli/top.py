"""x"""
def top() -> None:
    """x"""
