"""What bash passes to a program is what is read: the same snippets, run by a real shell."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapkit.megatron_lm.script import read_script

BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(BASH is None, reason="there is no bash to compare with")

# ``L`` stands for a launch; every L of a snippet must get the same arguments from both.
SNIPPETS = r"""
A=1; L $A "$A" '$A' "${A}b" a${A}b
A="a b  c"; L $A "$A" x$A"y $A"z
A=; L $A "" "$A" '' x
A=" x "; L a$A"b" $A
A=(1 "2 3" '' 4); L ${A[@]} "${A[@]}" "${A[*]}" ${A[*]} "x${A[@]}y" "${#A[@]}" ${A[1]} "${A[-1]}" $A
A=(); L "${A[@]}" x "${A[*]}"
A=(a); A+=(b c); A[5]=z; A[0]+=q; L "${A[@]}" "${#A[@]}" "${!A[@]}"
declare -A M=([a]=1 [b c]="2 3"); K=a; L "${M[$K]}" "${M[b c]}"
A=(1 2 3); L "${A[@]:1}" "${A[@]:0:2}" "${A[@]+"${A[@]}"}"
A=("--a 1" --b); L ${A[@]}
A=x; A+=y; A+=" z"; L "$A"
L ${U:-d} "${U:-d e}" ${U:-d e} ${U:-"d e"} ${U-x} "${U:+no}" ${U:+no} x
L "${U:-"a b"}" "${U:-'a b'}" ${U:-'a b'} "${U:-a\"b}" ${U:-${V:-w}}
A=; L ${A:-d} ${A-d} "${A-d}" ${A:+y} ${A+y} x
A=v; L ${A:-d} ${A:+y z} "${A:+y z}" ${A:=q}
: ${B:=8}; L $B; : "${C:="4 5"}"; L $C
L \$A "\$A" "\a" \a "a\\b" 'a\b' $'a\tb\x41\101\'' "a'b" 'a"b'
A=5; L $((A+1)) $(( $A * 2 - 3 )) $((7/2)) $((-7/2)) $((-7%3)) $((2**10)) $((A>3?1:0)) $((1<<4|1)) $(((1+2)*3))
A=5; L $((A==5&&A<9)) $((0x1F)) $((010)) $(( A )) "$((1+(2*3)))" $[1+2] $((!A)) $((~A)) $((-A + -1))
A=a/b/c.tar.gz; L ${A##*/} ${A#*/} ${A%.*} ${A%%.*} ${A%/*} ${A/b/X} ${A//./_} ${A^^} ${A:2} ${A:0:3} ${A: -2} ${#A}
A="a b"; B=A; L "${!B}"
A="x"; L "$A"'$A'"$A" a"b"c'd'e a#b # c
X=8; L "a${X}b" "a$X.b" "$X$X" "${X}_$X"
X=$'a\nb'; L $X "$X"
A='{"a": 1}'; L "$A" $A '{"b": [1, 2]}'
L --x={1,2} a{b,c}d {3..1} {x} a{,b}
set -- p "q r" s; L "$@" $# "$1" $2 "${2}" "${@:2}" $*
set -- p q r; shift; L "$@" $1
set -- ; L "$@" x $*
f() { local x=$1; shift; L "$x" "$@" "$#"; }; f "a b" c d
f() { X=in; local Y=in; }; Y=out; f; L $X $Y
f() { if [ "$1" = a ]; then return; fi; Z=1; }; f a; L ${Z:-none}
f() { [ "$1" = a ] && return; Z=1; }; f a; f b; L ${Z:-none}
f() { L "$@"; }; g() { f "$@" z; }; g "a b"
for i in a b c; do if [ $i = b ]; then continue; fi; A+=($i); done; L "${A[@]}"
for i in 1 2 3 4; do [ $i -eq 3 ] && break; B+=" $i"; done; L $B
for i in {1..3} {a,b}x; do C+=($i); done; L "${C[@]}"
i=0; while [ $i -lt 4 ]; do i=$((i+1)); D+=" $i"; done; L $D $i
i=3; until (( i == 0 )); do ((i--)); E+="$i"; done; L $E
if [ 1 -gt 2 ]; then A=a; elif [[ x == x ]]; then A=b; else A=c; fi; L $A
case abc in a) A=1;; a*|b) A=2;; *) A=3;; esac; L $A
case 7B in [0-9]B) A=d;; esac; L $A
A=ab; [[ $A == a* ]] && B=1; [[ $A == "a*" ]] || C=2; [[ $A != b && ( -n $A || -z $A ) ]] && D=3; L $B $C $D
A=""; [ -z "$A" ] && B=1; [ -n "$A" ] || C=2; [ ! -z "$A" ] || D=3; [ -z $A ] && E=4; L $B $C $D $E
[ a = a -a b = b ] && A=1; [ a = b -o b = b ] && B=2; test 3 -le 3 && C=3; [ a != a ] || D=4; L $A $B $C $D
[[ 3 -lt 10 && 3 < 10 ]] || A=str; L $A
(( 3 > 2 )) && A=1; ((0)) || B=2; L $A $B
A=3; ((A+=2)); ((A++)); let A=A*2; L $A
true && L a b || L c
! false && L b
CMD="L a 'b c' \$X"; X="p q"; eval $CMD
CMD='L a "b c" $X'; X="p q"; eval "$CMD"
CMD="L a 'b c'"; $CMD
X=1; (X=2; Y=3); { Z=4; }; L $X ${Y:-no} $Z
unset A; A=1; unset A; L ${A-unset}
readonly A=5; export B=6 C="7 8"; declare D=9; typeset E=10; L $A $B "$C" $D $E
if [ "${SP:-true}" = true ] && [ ${TP:-2} -gt 1 ]; then A=--sp; fi; L $A
L >/dev/null a 2>&1 b
f() { L ${A:-none}; }; A=1 f; f
f() { A+=$1; L $A; }; A=0; A=5 f 1; f 2
A=3 eval 'L $A'; L ${A-unset}
read -r A <<< "  1 2 "; L "$A"
read -r A B <<< " 1  2 3 "; L "$A" "$B"
read A B C <<< "1 2"; L "$A" "$B" "${C-unset}"
IFS=, read -ra P <<< "1,2,,3,"; L "${P[@]}" "${#P[@]}"
IFS=: read -r A B <<< "1:2:3"; L "$A" "$B"
IFS=: read -r A B <<< "1:2:"; L "$A" "$B"
IFS= read -r A <<< "  1 2 "; L "$A"
read -r <<< " x "; L "$REPLY"
read -rp "N: " N <<< 4; L $N
mapfile -t A <<< $'--a 1\n--b\n\n'; L "${A[@]}" ${#A[@]}; L ${A[1]}
readarray A <<< $'1\n2'; L "${A[@]}"
IFS=,; A="1,2,,3,"; L $A "$A" x,y
IFS=,; A=(1 2 3); L "${A[*]}" ${A[*]} "${A[@]}"; B=${A[*]}; L "$B"
IFS=', '; A=" 1 , 2,,3  4"; L $A
IFS=$'\n'; A=$'1 2\n\n3'; L $A
IFS=; A="1 2"; B=(1 2); L $A "${B[*]}" ${B[*]}
OLD=$IFS; IFS=,; IFS=$OLD; A="1,2 3"; L $A
IFS=,; unset IFS; A="1,2 3"; L $A
IFS=:; set -- 1 2; L "$*" "$@"
TP=2; (( TP <<= 1 )); L $TP
A=1; L $((A+=2)) $A; L $A
A=3; L $((A++)) $((++A)) $((A--)) $((--A)) $A
A=1; B=$((A=5, A+1)); L $A $B
A=0; L $((A && (A=4))) $((A || (A=7))) $A $((0 ? 1/0 : 2))
A=7; ((A&=3)); ((A|=8)); ((A^=1)); ((A%=4)); L $A
A=5; ((A-=2, A*=3)); let "A/=2" B=A+1; L $A $B
L $((10#08)) $((16#ff)) $((2**3**1)) $((- -3)) $((1,2))
i=3; while (( i-- > 0 )); do A+=$i; done; L $A $i
i=3; while (( --i )); do A+=$i; done; L $A $i
i=0; until (( i++ >= 3 )); do A+=$i; done; L $A $i
i=1; (( i++ )) && L $i
i=0; (( i++ )) || L $i
i=0; if (( i++ )); then L a; else L b $i; fi
((A=0)) && B=1 || B=2; L $A $B
A=(1 2); i=0; L ${A[i++]} ${A[i]} $i
A=5; (( A == 5 && (A=6) )); L $A
for ((i=0, j=5; i<j; i++, j-=1)); do A+=$i$j; done; L $A
A=3; L $((A>2?A=9:(A=8))) $A
L {a,b}{c,d} x{1,2}y{3..4}z {01..03} {1..8..2} {a..c} {8..1..3} {c..a} {-1..1} {a,{b,c}} {a,b{1..2}} {} {a} {a,b x{,y}
A=1; L {$A,2} x{${A},"b c"}y "{a,b}" '{a,b}' {a,"b,c"} \{a,b} {a\,b,c} {a,b}$A ${A}{1,2}
L --x={a,b} {1..3}{a,b} {a..e..2} {5..5} {,a} {a,} {a,,b} {-01..2} {1..a} {1.5..2} {"1"..3} a{1..2}{
A=({1..3} {x,y}z); L "${A[@]}"
for i in {01..03} {a..c}{1,2}; do B+=($i); done; L "${B[@]}"
L {{a,b},c} {a,b}} {{a,b} }{a,b}{ x{a,b,}y $((1+2)){a,b} "${U:-{a,b}}" ${U:-{a,b}}
L {1..10..0} {1..3..-1} {3..1..-1} {001..2} {A..C} {a..C..30}
A="{a,b}"; L $A {$A,c}
f() { local -n r=$1; r+=(x); r[0]=q; L "${r[@]}" ${#r[@]} "$r"; }; A=(1 2); f A; L "${A[@]}"
declare -n R=V; V=1; R=2; L $V $R ${R:-x} $((R+1)) "${!R}"
f() { local -n r=$1; r=5; }; f OUT; L $OUT ${r-none}
A=(1 2 3); unset 'A[1]'; L "${A[@]}" ${#A[@]} "${!A[@]}"; i=2; unset "A[i]" ; L "${A[@]}"
declare -A M=([a]=1 [b]=2); unset 'M[a]'; L "${M[@]}"
case ab in a*) A=1;;& *b) B=2;;& x) C=3;;& *) D=4;; esac; L $A $B $C $D
case a in a) A=1;& b) B=2;& c) C=3;; *) D=4;; esac; L $A $B $C $D
case z in a) A=1;& *) D=4;& b) B=2;; esac; L $A $B $C $D
case ab in a*) A=1;& b) B=1;;& *b) C=1;; *) D=1;; esac; L $A $B $C $D
case a in a) A=1;;& esac; L $A
declare -i N=3+4; N+=2; L $N; N="N*2"; L $N
f() { declare -g G=1; declare H=2; local -i K=2*3; L $K; }; f; L ${G-no} ${H-no}; K=1+1; L $K
declare -u U=abc; declare -l W=ABC; L $U $W; U=x; L $U
declare -ri X=4*2; typeset -i Y=X+1; L $X $Y
declare -a A=(1 2); declare -ax B=(3); L ${A[1]} $B
unset -v A; A=1; unset -v A; L ${A-no}; f() { L f; }; unset -f f; f; L x
A=([2]=c [0]=a); L "${A[@]}" "${!A[@]}"
A=(x y); A=("${A[@]/#/-}"); L "${A[@]}"
[ 08 -eq 8 ] && A=1; [ 010 -eq 10 ] && B=1; L $A $B
[ " 8 " -eq 8 ] && C=1; [ -1 -lt 0 ] && D=1; [ x -eq 0 ] || E=1; L $C $D $E
TP=8; [[ $TP =~ ^[0-9]+$ ]] && A=1; [[ x8 =~ ^[0-9]+$ ]] || B=1; L $A $B
TP=8; [[ $TP =~ [0-9] ]] && C=1; [[ abc =~ b ]] && D=1; L $C $D
RE='^[0-9]+$'; [[ 12 =~ $RE ]] && A=1; [[ 1a =~ ${RE} ]] || B=1; L $A $B
[[ 7B =~ ^(7|13)B$ ]] && C=1; [[ 17B =~ ^(7|13)B$ ]] || D=1; L $C $D
[[ v1.2 =~ ^v[0-9]+\.[0-9]+$ ]] && A=1; [[ h100 =~ ^[[:alpha:]][[:digit:]]{3}$ ]] && B=1; L $A $B
[[ a.b =~ "." ]] && C=1; [[ ab =~ "." ]] || D=1; L $C $D
[[ "a b" =~ a\ b ]] && A=1; [[ true =~ ^(true|yes|1)$ ]] && B=1; L $A $B
[[ llama-70b =~ 7.b|8b ]] && A=1; [[ abc =~ ^$ ]] || B=1; [[ "" =~ ^$ ]] && C=1; [[ ab =~ a.*b ]] && D=1; L $A $B $C $D
[[ "a b" =~ "a b" ]] && A=1; [[ axb =~ a"."b ]] || B=1; L $A $B
X='a.'; [[ a.b =~ a"."b ]] && C=1; [[ abc =~ "$X" ]] || D=1; [[ abc =~ $X ]] && E=1; L $C $D $E
[[ abc =~ (a|b)c ]] || A=1; [[ abc =~ (ab|b)c$ ]] && B=1; [[ ab =~ ^a{1}b{0,2}$ ]] && C=1; L ${A-n} $B $C
[[ 3 -lt 10 && "" -eq 0 ]] && A=1; [ "" -eq 0 ] 2>/dev/null || B=1; L $A $B
set -- a b; [ $# -eq 2 ] && A=1; (( $# > 1 )) && B=1; [[ $# -lt 3 ]] && C=1; L $A $B $C
f() { local -a A; L "${A[@]}" x; A+=(1); L "${A[@]}"; }; f
declare -a A; L "${A[@]}" x; declare -A M; M[k]=v; L "${M[@]}" "${M[k]}"
f() { local A; A="$A --x"; L $A; }; f
A=(1 2 3); declare -a A; L "${A[@]}"
case x in x) A=1; esac; case x in x) B=1;; esac; L $A $B
case a in a) case b in b) A=1;; esac;; esac; L $A
f() { local -n r=$1; for x in "${r[@]}"; do L $x; done; unset r; }; A=(1 2); f A
f() { local -n a=$1; g a; }; g() { local -n b=$1; b=7; }; f OUT; L $OUT
f() { declare -n a=$1; a+=(--z); (( ${#a[@]} > 1 )) && L "${a[@]}"; }; A=(--y); f A
L {a,b\ c} {'a b',c}
[[ 08 -eq 8 ]] && A=1; [[ 010 -eq 8 ]] && B=1; X=3; [[ X -eq 3 ]] && C=1; [[ X+1 -gt 3 ]] && D=1; L ${A-a} $B $C $D
A=(); i=2; A[i]=x; A[i+1]=y; A[-1]=z; A[$i]+=w; L "${A[@]}" "${!A[@]}" "${A[i]}"
declare -A M; M[i]=x; M[a b]=y; i=2; M[$i]=z; L "${M[i]}" "${M[a b]}" "${M[2]}" "${#M[@]}"
declare -A M=([7B]=32 [13B]=40); K=13B; L ${M[$K]} ${M[7B]}
f() { local -A M=([a]=1); M[b]=2; L ${M[a]} ${M[b]}; }; f
i=1; A=([i]=x [i+1]=y z); L "${A[@]}" "${!A[@]}"
A=(a b c); A=("${A[@]/%/.x}"); L "${A[@]}"
A=3; L $((A|=(A=++A))) $((A+=((A=2)||1))) $A
IFS=,; V=(1 '' 2); L ${V[@]} ${V[*]}; set -- a ,b; L $@
"""
LONG = [
    "L a\\\nb c \\\n  d",
    "L \"a\\\nb\" 'a\\\nb'",
    'A=(--a 1 # c\n  --b "2 3" # d\n  # e\n); L "${A[@]}"',
    'O=" \\\n   --a 1 \\\n   --b 2"; L ${O}',
    "read -r -d '' X <<'E'\n--a 1\n--b \"$q\"\nE\nL $X",
    'read -r A B <<E\n1 2 3\n4\nE\nL "$A" "$B"',
    "mapfile -t A <<'E'\n--a\n--b $x\nE\nL \"${A[@]}\"",
    "V=8; read -r -d '' X <<E\n--a $V \\$V\nE\nL $X",
]
PROGRAM = "torchrun pretrain.py --train-iters 1"
STUB = "exec 3>&1 >/dev/null 2>&1; cd /; torchrun() { printf '%s\\0' \"$@\" >&3; printf '\\1' >&3; }\n"


def passed_by_bash(script: str) -> list[list[str]]:
    done = subprocess.run([BASH, "-c", STUB + script], capture_output=True, env={"PATH": "/usr/bin:/bin"}, timeout=20)
    return [part.decode().split("\0")[3:-1] for part in done.stdout.split(b"\1")[:-1]]


def read(script: str) -> list[list[str | None]]:
    return [[word.text for word in launch.arguments[2:]] for launch in read_script(script, "job.sh") if launch.taken]


@pytest.mark.parametrize("snippet", [*SNIPPETS.strip().split("\n"), *LONG])
def test_arguments_are_those_that_bash_passes(snippet: str):
    script = re.sub(r"(?<![\w-])L(?=[ \n])", PROGRAM, snippet) + "\n"
    passed = passed_by_bash(script)
    assert passed
    assert sorted(read(script)) == sorted(passed)


_text = st.text(st.sampled_from("ab1 -\t"), max_size=4)
_part = st.one_of(
    st.sampled_from(["${A}", '"$A"', '"${A}"', '"${B[@]}"', "${B[*]}", '"${B[*]}"', "${B[1]}", "${U:-x y}"]),
    st.sampled_from(['"${U:-x y}"', "${A:+$A}", "$((1+2))", "\\ ", "\\$A", "'$A'", '"a\\"b"', "${#A}", "''", '""']),
    _text.filter(lambda text: "\t" not in text).map(lambda text: f"'{text}'"),
    st.sampled_from(["a", "b1", "-x", "--y=", " ", "  "]),
)


@settings(max_examples=150, deadline=None)
@given(_text, st.lists(_text, max_size=3), st.lists(_part, max_size=8))
def test_words_of_any_parts_are_those_that_bash_passes(value: str, items: list[str], parts: list[str]):
    array = " ".join(f"'{item}'" for item in items)
    script = f"A='{value}'; B=({array})\n{PROGRAM} {''.join(parts)}\n"
    assert read(script) == passed_by_bash(script)


_divided = st.text(st.sampled_from("ab, :\t"), max_size=8)
_dividers = st.sampled_from([",", ":", ", ", " ", "", " ,:"])
_uses = [
    "IFS='{ifs}'; V='{value}'; L x$V'y' $V",
    "IFS='{ifs}' read -r P Q <<< '{value}'; L \"$P\" \"$Q\"",
    "IFS='{ifs}' read -ra P <<< '{value}'; L \"${{P[@]}}\" x",
    "IFS='{ifs}'; V=(1 '{value}' 2); L \"${{V[*]}}\" ${{V[@]}}",
    "IFS='{ifs}'; set -- a '{value}'; L \"$*\" $@",
]


@settings(max_examples=100, deadline=None)
@given(_divided, _dividers, st.sampled_from(_uses))
def test_words_end_where_ifs_says(value: str, ifs: str, use: str):
    script = use.format(ifs=ifs, value=value).replace("L ", f"{PROGRAM} ") + "\n"
    assert read(script) == passed_by_bash(script)


def _operations(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    operators = st.sampled_from(["+", "-", "*", "%", "/", "&&", "||", "|", "&", "^", "<", "==", "<=", ","])
    return st.one_of(
        st.tuples(inner, operators, inner).map(" ".join),
        st.tuples(inner, inner, inner).map(lambda parts: "({}?{}:{})".format(*parts)),
        st.tuples(st.sampled_from("-!~"), inner).map(lambda parts: "{} ({})".format(*parts)),
        st.tuples(st.sampled_from(["A=", "B+=", "A<<=", "B|="]), inner).map(lambda parts: "({}{})".format(*parts)),
    )


_numbers = st.sampled_from(["A", "B", "0", "1", "2", "7", "010", "0x1f", "A++", "++B", "A--"])


@settings(max_examples=100, deadline=None)
@given(st.recursive(_numbers, _operations, max_leaves=6))
def test_numbers_are_those_that_bash_computes(expression: str):
    script = f"A=3; B=5; {PROGRAM} $(({expression})) $A $B\n"
    passed, found = passed_by_bash(script), read(script)
    assert found == passed or None in found[0] or len(found[0]) < 3  # unknown where bash prints an error, or beyond 64
