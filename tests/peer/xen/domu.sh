#!/bin/busybox sh
# Everything that an unprivileged domain does. In the initramfs: loads blkfront and goes on from the root on
# /dev/xvda, where this file is /sbin/init. There: checks what the root was made with, writes more, reads it
# back from the disk, and powers off in order. The kernel's argument task=… says what else it does:
#   reboot   starts again after the first writes, and finds them
#   work     writes and reads back again and again, until a line comes on its console
export PATH=/bin

fail() {
  echo "SPILE BROKEN $1"
  dmesg | tail -n 20
  poweroff -f
}

to_root() {
  /bin/busybox --install -s /bin
  mount -t proc proc /proc
  mount -t sysfs sysfs /sys
  mount -t devtmpfs dev /dev
  while read -r name; do insmod /modules/$name.ko || fail "module $name"; done </modules/order
  tries=0
  while [ ! -b /dev/xvda ] && [ $tries -lt 600 ]; do sleep 0.1; tries=$((tries + 1)); done
  mount -t ext4 -o noatime /dev/xvda /mnt || fail "the root does not mount"
  for folder in dev proc sys; do mount --move /$folder /mnt/$folder; done
  exec switch_root /mnt /sbin/init
}

check() {
  echo 3 >/proc/sys/vm/drop_caches
  (cd $1 && sha256sum -c sums >/dev/null) || fail "what is in $1"
}

write() {
  mkdir -p /written
  for size in 1 4 7 10 13 16 19 22; do
    dd if=/dev/urandom of=/written/$size bs=13000 count=$size 2>/dev/null || fail "a write"
  done
  (cd /written && sha256sum [0-9]* >sums) || fail "the sums"
  sync || fail "sync"
}

# After a reboot, the files of the first run must exist.
reboot_once() {
  if [ -e /rebooting ]; then
    rm /rebooting
    check /written
    return
  fi
  write
  touch /rebooting
  end
  echo "SPILE REBOOTS domU"
  reboot -f
}

work() {
  { read -r line </dev/console; : >/dev/stop; } &
  pass=0
  until [ -e /dev/stop ]; do
    write
    check /written
    pass=$((pass + 1))
    echo "SPILE PASS $pass"
  done
}

# In order, so that the file system needs no recovery.
end() {
  sync || fail "sync"
  mount -o remount,ro / || fail "the root does not go read-only"
}

[ ! -e /modules/order ] || to_root
echo "SPILE BOOTED domU"
check /checked
case "$task" in
  reboot) reboot_once ;;
  work) work ;;
esac
write
check /written
dmesg | grep -E 'I/O error|EXT4-fs (error|warning)' && fail "the kernel complains"
echo "SPILE FRONT $(dmesg | grep -o 'blkfront: xvda: .*')"
end
echo "SPILE VERIFIED domU"
poweroff -f
