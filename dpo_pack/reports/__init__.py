"""Reports for people: tables in the terminal and pages in the browser."""
