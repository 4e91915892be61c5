"""What a sweep leaves behind: matrix.csv, a terminal table, pictures, and a page that explains."""
