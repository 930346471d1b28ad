// Loaded into a program (LD_PRELOAD), it has syncs fail or take long when files in the folder $FAULTS say so.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static int sync_by(const char *name, int fd)
{
	char path[4096];
	const char *folder = getenv("FAULTS");
	int (*next)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);

	snprintf(path, sizeof(path), "%s/fail-sync", folder ? folder : "");
	if (unlink(path) == 0) {
		// As the kernel does: it is told once, and the next sync knows nothing of it.
		errno = EIO;
		return -1;
	}
	snprintf(path, sizeof(path), "%s/full-sync", folder ? folder : "");
	if (unlink(path) == 0) {
		errno = ENOSPC;
		return -1;
	}
	snprintf(path, sizeof(path), "%s/slow-sync", folder ? folder : "");
	if (access(path, F_OK) == 0)
		sleep(2);
	return next(fd);
}

int fdatasync(int fd)
{
	return sync_by("fdatasync", fd);
}

int fsync(int fd)
{
	return sync_by("fsync", fd);
}
