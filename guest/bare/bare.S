# A guest of one boot sector that needs no operating system, so that it also runs under a KVM on which stock kernels do not.
#
# Each processor rewrites its own 48 MiB, the first from 16 MiB on, the second (started here, where there is one) from 64 MiB on: in every page
# the number of the pass and the page's address. Before it writes a page it checks that the page still holds the content of the pass before.
# Each processor writes a line to the serial port every 8 passes, "a" the first and "b" the second; "!" means a wrong page.
#
# as --32 -o bare.o bare.S && ld -m elf_i386 -Ttext 0x7c00 --oformat binary -o bare.bin bare.o
.code16
.globl _start
_start:                                 # the second processor begins here too
    cli
    xor %ax, %ax
    mov %ax, %ds
    lgdt gdtr
    mov %cr0, %eax
    or $1, %al
    mov %eax, %cr0
    ljmp $8, $protected
.code32
protected:
    mov $16, %ax
    mov %ax, %ds
    mov %ax, %es
    mov %ax, %ss
    mov $1, %ebp
    lock xadd %ebp, arrived             # which processor this is
    imul $0x800, %ebp, %esp
    neg %esp
    add $0x7000, %esp
    test %ebp, %ebp
    jnz work

    in $0x92, %al                       # the 21st address line
    or $2, %al
    out %al, $0x92

    movb $0xea, 0x8000                  # at 0x8000: ljmp $0, $_start
    movl $_start, 0x8001
    mov $0xfee00300, %edi               # the local APIC's interrupt command register
    movl $0x000c4500, (%edi)            # INIT to all but this one
    mov $0x100000, %ecx
1:  pause
    loop 1b
    movl $0x000c4608, (%edi)            # STARTUP at 0x8000

work:
    imul $0x3000000, %ebp, %esi
    add $0x1000000, %esi                # from
    lea 0x3000000(%esi), %ebx           # to
    xor %ecx, %ecx                      # pass
again:
    mov %ecx, %eax                      # the pass before
    inc %ecx
    mov %esi, %edi
page:
    test %eax, %eax
    jz write                            # nothing was written before the first pass
    cmp %eax, (%edi)
    jne wrong
    cmp %edi, 4(%edi)
    jne wrong
write:
    mov %ecx, (%edi)
    mov %edi, 4(%edi)
    add $4096, %edi
    cmp %ebx, %edi
    jb page
    test $7, %cl
    jnz again
    lea 'a'(%ebp), %eax
    call say
    jmp again
wrong:
    push %eax
    mov $'!', %al
    call say
    pop %eax
    jmp write
say:
    mov $0x3f8, %dx
    out %al, %dx
    mov $'\n', %al
    out %al, %dx
    ret

.align 4
arrived: .long 0
.align 8
gdt: .quad 0
    .quad 0x00cf9a000000ffff
    .quad 0x00cf92000000ffff
gdtr: .word 23
    .long gdt
.org 510
.word 0xaa55
