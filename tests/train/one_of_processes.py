"""One process of a run: trains as `raggedmoe train WORD…`. Arguments: PORT NUMBER COUNT DEVICES WORD…"""

import sys

import jax


def main():
    port, number, count, devices = (int(word) for word in sys.argv[1:5])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=count, process_id=number)

    from raggedmoe.cli.train import train

    sys.exit(train(tuple(sys.argv[5:])))


if __name__ == "__main__":
    main()
