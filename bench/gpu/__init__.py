"""What runs on a real GPU: sections that fail alone, their results, and the page that shows them."""
