// Loaded into a program (LD_PRELOAD), it has syncs fail or take long when files in the folder $FAULTS say so.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

// While hang-sync has the number of this file's inode, its syncs wait, for two minutes at most. The file "hangs" tells that one does.
static void hang(const char *folder, int fd)
{
	char path[4096];
	struct stat file;

	for (int waited = 0; waited < 12000; waited++) {
		unsigned long long inode = 0;
		snprintf(path, sizeof(path), "%s/hang-sync", folder);
		FILE *told = fopen(path, "r");
		if (!told)
			return;
		int found = fscanf(told, "%llu", &inode);
		fclose(told);
		if (found != 1 || fstat(fd, &file) != 0 || file.st_ino != inode)
			return;
		if (waited == 0) {
			snprintf(path, sizeof(path), "%s/hangs", folder);
			close(open(path, O_CREAT | O_WRONLY, 0600));
		}
		usleep(10000);
	}
}

// True when the file of that name has the number of this file's inode. It is removed then.
static int is_named(const char *folder, const char *name, int fd)
{
	char path[4096];
	struct stat file;
	unsigned long long inode = 0;

	snprintf(path, sizeof(path), "%s/%s", folder, name);
	FILE *told = fopen(path, "r");
	if (!told)
		return 0;
	int found = fscanf(told, "%llu", &inode);
	fclose(told);
	return found == 1 && fstat(fd, &file) == 0 && file.st_ino == inode && unlink(path) == 0;
}

// True when the file at the path has a number above 0, which is one less now.
static int counts_down(const char *path)
{
	int left = 0;
	FILE *told = fopen(path, "r+");

	if (!told)
		return 0;
	int counts = fscanf(told, "%d", &left) == 1 && left > 0;
	if (counts) {
		rewind(told);
		fprintf(told, "%d \n", left - 1);
	}
	fclose(told);
	return counts;
}

static int sync_by(const char *name, int fd)
{
	char path[4096];
	struct stat file;
	const char *folder = getenv("FAULTS");
	int (*next)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);

	snprintf(path, sizeof(path), "%s/fail-sync", folder ? folder : "");
	if (unlink(path) == 0 || is_named(folder ? folder : "", "fail-sync-of", fd)) {
		// As the kernel does: it is told once, and the next sync knows nothing of it.
		errno = EIO;
		return -1;
	}
	// As by kill -9, right after the name of a file was changed in the folder whose inode number the file kill-at-sync-of has.
	if (is_named(folder ? folder : "", "kill-at-sync-of", fd))
		raise(SIGKILL);
	snprintf(path, sizeof(path), "%s/full-sync", folder ? folder : "");
	// A folder has its room.
	if (fstat(fd, &file) == 0 && !S_ISDIR(file.st_mode) && !counts_down(path) && unlink(path) == 0) {
		errno = ENOSPC;
		return -1;
	}
	snprintf(path, sizeof(path), "%s/slow-sync", folder ? folder : "");
	if (access(path, F_OK) == 0)
		sleep(2);
	hang(folder ? folder : "", fd);
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
