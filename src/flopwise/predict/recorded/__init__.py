"""Operations that a dry run recorded of a user's step, under other recipes."""
