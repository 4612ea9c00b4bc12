"""A case as one page of HTML, and as JUnit XML."""
