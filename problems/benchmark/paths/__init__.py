"""Times of the paths that can compute a product, beside the path that choose_path takes.

kernels/linear/operator/choose_path.h has choose_path, and explains the paths.

For both measurements, `paths` and `path-grid`:

kernel_paths.py      the names of the paths
path_calls.py        the calls that are timed
choice.py            asks choose_path.h for the path of a product, by print_paths.cpp

                     `paths`                  `path-grid`

the products         products.py              grid.py
the measurement      measure_paths.py         measure_path_grid.py
rows of results      also measure_paths.py    grid_rows.py
the table of them    products_table.py        grid_table.py
after a new limit    measure again            `choose-again`: choose_again.py
"""
