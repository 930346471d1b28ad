#!/bin/busybox sh
# The first process of the first domain: brings up what Xen's tools need, then does what the host asks
# for on a virtio port, one line a command, with the functions below. The programs are on /dev/vda,
# which is only read; what a test brings is on /dev/vdb.
/bin/busybox --install -s /bin
export PATH=/tools/bin:/data/bin:/bin:/sbin HOME=/

mounts() {
  mount -t proc proc /proc
  mount -t sysfs sysfs /sys
  mount -t devtmpfs dev /dev
  mkdir -p /dev/pts /dev/shm
  mount -t devpts devpts /dev/pts
  for folder in /dev/shm /run /tmp; do mount -t tmpfs tmpfs $folder; done
}

disks() {
  until_true '[ -b /dev/vda ] && [ -b /dev/vdb ]' &&
    mount -t ext4 -o ro /dev/vda /tools &&
    mount -t ext4 -o noatime /dev/vdb /data
}

# The work of a system's start-up scripts, as far as xl needs it.
toolstack() {
  mkdir -p /run/xen /run/xenstored /run/console /var/lib/xen /var/lib/xenstored /var/log/xen
  mount -t xenfs xenfs /proc/xen
  tools=$(dirname "$(readlink -f /tools/bin/xl)")
  $tools/xenstored --pid-file /run/xenstored.pid &&
    until_true 'xenstore-read / >/dev/null 2>&1' &&
    $tools/xen-init-dom0 &&
    $tools/xenconsoled --pid-file=/run/xenconsoled.pid --log=guest --log-dir=/run/console
}

# Busybox has smaller ones of these, which the shell would run instead.
mke2fs() {
  /tools/bin/mke2fs "$@"
}

ip() {
  /tools/bin/ip "$@"
}

# load MODULE [OPTION…]: loads a module; it may be loaded already, or built in.
load() {
  [ -e /sys/module/$1 ] || { module=$1; shift; insmod /modules/$module.ko "$@"; }
}

# until_true COMMAND: repeats a command until it succeeds, for ten minutes or so at most.
until_true() {
  tries=0
  until eval "$1"; do
    tries=$((tries + 1))
    [ $tries -lt 5000 ] || { echo "never true: $1"; return 1; }
    sleep 0.1
  done
}

# done_on DEVICE: prints how many reads and writes the device has completed.
done_on() {
  set -- $(cat /sys/block/$1/stat)
  echo $(($1 + $5))
}

# sum_of FILE: prints the checksum of the content, read from the device again.
sum_of() {
  sync && echo 3 >/proc/sys/vm/drop_caches && sha256sum <$1 | cut -d' ' -f1
}

# start NAME COMMAND…: runs a command in the background. Its output is in /tmp/NAME.log, its id in /tmp/NAME.pid,
# and its exit code is in /tmp/NAME.status once it has ended.
start() {
  name=$1
  shift
  rm -f /tmp/$name.status
  { "$@" & echo $! >/tmp/$name.pid; wait $!; echo $? >/tmp/$name.new; mv /tmp/$name.new /tmp/$name.status; } \
    >/tmp/$name.log 2>&1 &
}

# hammer DEVICE DEPTH [SIZE]: makes passes of verified writes until /tmp/stop exists. Every pass has a seed of its
# own, so that a block left over from an earlier pass is a mismatch.
hammer() {
  pass=0
  rm -f /tmp/stop
  while [ ! -e /tmp/stop ]; do
    pass=$((pass + 1))
    verified $1 $2 $pass --size=${3:-16m} >/tmp/pass.log 2>&1 || { cat /tmp/pass.log; return 1; }
    echo "pass $pass"
  done
}

# verified DEVICE DEPTH SEED OPTION…: writes, reads back and compares.
verified() {
  device=$1 depth=$2 seed=$3
  shift 3
  fio --name=verified --filename=$device --iodepth=$depth --thread --ioengine=libaio --direct=1 \
    --rw=randwrite --bsrange=4k-64k --fsync=64 --randseed=$seed --verify=crc32c --verify_fatal=1 \
    --verify_state_save=0 --do_verify=1 --verify_backlog=32 "$@"
}

# rests PROGRAM DEVICE: stops the program. True when it runs, all of it is stopped, and the device has nothing in flight. Between two
# passes of `hammer` there is no program to be stopped, and the next one would run.
rests() {
  killall -STOP $1 2>/dev/null || return 1
  for id in $(pidof $1); do
    ! grep -h '^State:' /proc/$id/task/*/status | grep -qv 'T (stopped)' || return 1
  done
  [ -n "$(pidof $1)" ] && [ "$(tr -d ' ' </sys/block/$2/inflight)" = 00 ]
}

# `NUMBER COMMAND` lines come in, answers go out; `leave` ends it.
serve() {
  until_true 'ls /dev/vport*p1 >/dev/null 2>&1'
  exec 3<>"$(echo /dev/vport*p1)"
  echo "SPILE READY" >&3
  while read -r number line <&3; do
    (eval "$line") >/tmp/answer 2>&1 </dev/null 3>&-
    { echo "SPILE ANSWER $number $?"; cat /tmp/answer; echo "SPILE END $number"; } >&3
    [ "$line" != leave ] || return
  done
}

leave() {
  sync
}

broken() {
  echo "SPILE BROKEN $1"
  dmesg | tail -n 40
  poweroff -f
}

mounts
while read -r name; do insmod /modules/$name.ko || broken "module $name"; done </modules/order
disks || broken "the disks do not mount"
toolstack || broken "the tool stack does not come up"
echo "SPILE BOOTED dom0"
serve
umount /data
mount -o remount,ro /data 2>/dev/null
sync
echo "SPILE DONE"
poweroff -f
