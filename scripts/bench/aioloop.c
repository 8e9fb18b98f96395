// aioloop: the reference for `farblk bench`: random or sequential I/O on a block device through Linux's
// asynchronous I/O with O_DIRECT, in the smallest loop there is. It prints IOPS and the mean latency.
//
//	aioloop DEVICE read|randread|write|randwrite BLOCK_BYTES DEPTH SECONDS
//
// The system calls are made without libaio, so that only a C compiler is needed.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/fs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static double now(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec * 1e-9;
}

static void die(const char *what) {
	fprintf(stderr, "aioloop: %s: %s\n", what, strerror(errno));
	exit(1);
}

int main(int argc, char **argv) {
	if (argc != 6) {
		fprintf(stderr, "usage: aioloop DEVICE read|randread|write|randwrite BLOCK_BYTES DEPTH SECONDS\n");
		return 2;
	}
	int random = !strncmp(argv[2], "rand", 4), write = strstr(argv[2], "write") != NULL;
	size_t block = strtoul(argv[3], NULL, 0);
	int depth = atoi(argv[4]);
	double seconds = atof(argv[5]);
	int fd = open(argv[1], (write ? O_RDWR : O_RDONLY) | O_DIRECT);
	if (fd < 0)
		die(argv[1]);
	uint64_t size;
	if (ioctl(fd, BLKGETSIZE64, &size) < 0) {
		struct stat st;
		if (fstat(fd, &st) < 0)
			die("fstat");
		size = st.st_size;
	}
	if (block == 0 || depth < 1 || depth > 1024 || size < block) {
		fprintf(stderr, "aioloop: bad block size or depth for %s\n", argv[1]);
		return 2;
	}
	char *memory = mmap(NULL, block * depth, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	if (memory == MAP_FAILED)
		die("mmap");
	aio_context_t context = 0;
	if (syscall(SYS_io_setup, depth, &context) < 0)
		die("io_setup");
	struct iocb *cbs = calloc(depth, sizeof *cbs), **batch = calloc(depth, sizeof *batch);
	struct io_event *events = calloc(depth, sizeof *events);
	uint64_t blocks = size / block, state = 88172645463325252ull, next = 0, done = 0;
	int ready = depth;
	for (int i = 0; i < depth; i++) {
		cbs[i].aio_fildes = fd;
		cbs[i].aio_lio_opcode = write ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
		cbs[i].aio_buf = (uintptr_t)(memory + i * block);
		cbs[i].aio_nbytes = block;
		batch[i] = &cbs[i];
	}
	double start = now(), end = start + seconds, t = start;
	while (t < end) {
		for (int i = 0; i < ready; i++) {
			state ^= state << 13, state ^= state >> 7, state ^= state << 17;
			batch[i]->aio_offset = (random ? state : next++) % blocks * block;
		}
		for (int i = 0; i < ready;) {
			int n = syscall(SYS_io_submit, context, ready - i, batch + i);
			if (n < 0 && errno != EAGAIN)
				die("io_submit");
			i += n > 0 ? n : 0;
		}
		ready = syscall(SYS_io_getevents, context, 1, depth, events, NULL);
		if (ready < 0)
			die("io_getevents");
		for (int i = 0; i < ready; i++) {
			if (events[i].res != (int64_t)block) {
				errno = events[i].res < 0 ? -events[i].res : EIO;
				die("I/O");
			}
			batch[i] = (struct iocb *)(uintptr_t)events[i].obj;
		}
		done += ready;
		t = now();
	}
	printf("%.0f IOPS, %.1f us mean\n", done / (t - start), (t - start) * depth / done * 1e6);
	return 0;
}
