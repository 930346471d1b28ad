#!/bin/sh
# The guest's first process, and everything that a guest does: each test names a phase on the kernel's
# command line. `write` and `verify` report on the console; `serve` runs the host's commands from the
# second serial line, with the functions below.
export PATH=/bin
phase= last=0
for word in $(cat /proc/cmdline); do
  case "$word" in
    spile.phase=*) phase=${word#spile.phase=} ;;
    spile.last=*) last=${word#spile.last=} ;;
  esac
done

# Rounds of files, their sums and a sync, each told; between two rounds something that no sync
# covers. Nothing is removed or shortened, so that the file system has no orphans to tidy and a check
# after the journal's replay is exact.
write() {
  round=0
  while [ $round -lt 60 ]; do
    round=$((round + 1))
    folder=/data/$round
    mkdir -p $folder
    for size in 1 4 7 10 13 16 19 22; do
      dd if=/dev/urandom of=$folder/$size bs=13000 count=$size 2>/dev/null
    done
    (cd $folder && sha256sum * >sums.new && mv sums.new sums)
    sync
    echo "SPILE SYNCED $round"
    dd if=/dev/urandom of=/data/unsynced-$round bs=65536 count=8 2>/dev/null
  done
  while :; do
    dd if=/dev/urandom of=/data/unsynced bs=65536 count=8 conv=notrunc 2>/dev/null
  done
}

# Every round up to $last, the last one that was reported, must exist and be whole.
verify() {
  good=0
  while [ $good -lt $last ]; do
    next=$((good + 1))
    if ! (cd /data/$next && sha256sum -c sums >/dev/null 2>&1); then
      echo "SPILE BROKEN round $next"
      return
    fi
    good=$next
  done
  echo "SPILE VERIFIED $good"
}

# until_true COMMAND: repeats a command until it succeeds, for two minutes at most.
until_true() {
  tries=0
  until eval "$1"; do
    tries=$((tries + 1))
    [ $tries -lt 1200 ] || { echo "never true: $1"; return 1; }
    sleep 0.1
  done
}

# start NAME COMMAND…: runs a command in the background. Its output is in /tmp/NAME.log, and its exit code
# is in /tmp/NAME.status once it has ended.
start() {
  name=$1
  shift
  rm -f /tmp/$name.status
  { "$@"; echo $? >/tmp/$name.new; mv /tmp/$name.new /tmp/$name.status; } >/tmp/$name.log 2>&1 &
}

# hammer DEVICE JOBS DEPTH: makes passes of verified writes until /tmp/stop exists. Every pass has a seed
# of its own, so that a block left over from an earlier pass is a mismatch.
hammer() {
  pass=0
  rm -f /tmp/stop
  while [ ! -e /tmp/stop ]; do
    pass=$((pass + 1))
    fio --name=hammer --filename=$1 --numjobs=$2 --iodepth=$3 --thread --ioengine=libaio --direct=1 \
      --rw=randwrite --bsrange=4k-64k --size=24m --offset_increment=32m --fsync=64 --randseed=$pass \
      --verify=crc32c --verify_fatal=1 --verify_state_save=0 --do_verify=1 --verify_backlog=32 \
      --group_reporting >/tmp/pass.log 2>&1 || { cat /tmp/pass.log; return 1; }
    echo "pass $pass"
  done
}

# fill FOLDER COUNT: writes and syncs files of 8 MiB, and says `whole` when all are as they were written.
fill() {
  for number in $(seq $2); do
    dd if=/dev/urandom of=$1/$number bs=1M count=8 2>/dev/null && sync || return 1
  done
  (cd $1 && sha256sum [0-9]* >sums && sync && sha256sum -c sums >/dev/null) && echo whole
}

# Writes the same 8 MiB of memory again and again until /tmp/stop exists.
churn() {
  dd if=/dev/urandom of=/tmp/seed bs=1M count=8 2>/dev/null
  while [ ! -e /tmp/stop ]; do
    dd if=/tmp/seed of=/tmp/churn bs=1M conv=notrunc 2>/dev/null
  done
  rm -f /tmp/seed /tmp/churn
}

# read_twice FILE: reads two parts of 4 MiB, by O_DIRECT, into the same memory. It says `first` when the
# first is there, goes on when /tmp/go is there, says `second`, and, when /tmp/tell is there, the
# second part's sum. In between nothing but a device writes to that memory.
read_twice() {
  rm -f /tmp/go /tmp/tell /tmp/parts
  mkfifo /tmp/parts
  dd if=$1 of=/tmp/parts bs=4M count=2 iflag=direct 2>/dev/null &
  exec 4</tmp/parts
  take 1 >/tmp/part
  echo first
  await /tmp/go
  take 1023 >/tmp/part
  take 1 >/tmp/part
  echo second
  await /tmp/tell
  take 1023 >>/tmp/part
  sha256sum </tmp/part
  rm /tmp/part
}

take() {
  dd bs=4k count=$1 iflag=fullblock <&4 2>/dev/null
}

await() {
  while [ ! -e $1 ]; do sleep 0.1; done
}

# copy_and_compare DEVICE MIB: writes, reads back from the device itself and compares; prints the checksum.
copy_and_compare() {
  dd if=/dev/urandom of=/tmp/sent bs=1M count=$2 2>/dev/null &&
    dd if=/tmp/sent of=$1 bs=64k oflag=direct conv=fsync 2>/dev/null &&
    dd if=$1 of=/tmp/got bs=64k count=$(($2 * 16)) iflag=direct 2>/dev/null &&
    cmp /tmp/sent /tmp/got && sha256sum </tmp/got
}

# Answers `LENGTH NUMBER COMMAND` lines until one ends this process. An emulated serial line loses bytes now
# and then: a line of another length is not heard, and one heard twice is done once.
serve() {
  stty -F /dev/ttyS1 raw -echo
  exec 3<>/dev/ttyS1
  echo "SPILE READY" >&3
  heard=
  while read -r length number line <&3; do
    words="$number $line"
    [ "${#words}" = "$length" ] || continue
    if [ "$number" != "$heard" ]; then
      (eval "$line") >/tmp/answer 2>&1 </dev/null 3>&-
      status=$?
      heard=$number
    fi
    { echo "SPILE ANSWER $number $status"; cat /tmp/answer; echo "SPILE END $number"; } >&3
    [ "$line" != leave ] || return
  done
}

leave() { :; }

mount -o remount,rw,noatime /
mkdir -p /data
[ -e /sys/block ] || mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /tmp
echo "SPILE BOOTED $phase"
case "$phase" in
  write) write ;;
  verify) verify ;;
  serve) serve ;;
esac
sync
mount -o remount,ro /
echo "SPILE DONE"
reboot -f
